"""File of a ``file://`` store.

It holds the group's secret until all members have joined.
"""

import logging
import os
from urllib.parse import urlparse

__all__ = ["make_private"]

logger: logging.Logger = logging.getLogger("telegrad")


def make_private(init_method: str) -> None:
    """Make the file of a store readable only by this user; torch does not.

    Other addresses are ignored.

    Raises:
        RuntimeError: the file cannot be created, is a link, or belongs to another user.
    """
    url = urlparse(init_method)
    if url.scheme != "file" or not url.path:
        return
    try:
        file = os.open(url.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as e:
        raise RuntimeError(f"the group cannot meet at {init_method}: {e.strerror}") from e
    try:
        found = os.fstat(file)
        if found.st_uid != os.geteuid():
            raise RuntimeError(
                f"the group cannot meet at {init_method}: the file belongs to another user (uid {found.st_uid}), which"
                " could read the group's secret. Remove it, or name another one."
            )
        if found.st_mode & 0o077:
            os.fchmod(file, 0o600)
    except OSError as e:  # a file system without modes
        logger.warning("other users may read %s, which holds the group's secret: %s", init_method, e.strerror)
    finally:
        os.close(file)
