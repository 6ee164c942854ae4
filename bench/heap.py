"""The C library's heap in rows whose time it would decide.

As it comes, glibc's malloc gives large memory back to the kernel as soon as it is free, and takes it anew page by page:
26,000 page faults for a pass over layers of 100 MB, a fifth of its time. In threads other than a program's first one it
keeps more. So which thread a framework happens to run a pass in would be what such a row shows.
"""

import ctypes

__all__ = ["keep"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)


def keep() -> None:
    """From now on what this process frees stays with it, whichever thread frees it; blocks over 32 MB do not. Does
    nothing where the C library is another one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, value in ((_TRIM_THRESHOLD, (1 << 31) - 1), (_TOP_PAD, 64 << 20), (_MMAP_THRESHOLD, 32 << 20)):
        mallopt(parameter, value)
