"""The group's secret, and the key that the members derive from it.

An observer of a handshake can try secrets against it. A secret of random bytes withstands that; a phrase is stretched
with scrypt, by OpenSSL, so that each try takes a tenth of a second and 32 MiB.
"""

import functools
import hashlib
import hmac

from telegrad.options import LEAST_SECRET_BYTES, Options

__all__ = ["given_secret", "key_of"]

_COST = {"n": 1 << 15, "r": 8, "p": 1, "maxmem": 64 << 20}
_PURPOSE = b"telegrad group key\0"


def given_secret(options: Options) -> bytes | None:
    """Return the secret from the option or the file; None if there is none.

    Raises:
        ValueError: The file is empty, or the secret too short.
        OSError: The file cannot be read; the text names the option.
    """
    if options.secret:
        return options.secret.encode()
    if not options.secret_file:
        return None
    try:
        with open(options.secret_file, "rb") as f:
            secret = f.read().strip()
    except OSError as e:
        why = f"{e.strerror}: the group's secret cannot be read (option secret_file, TELEGRAD_SECRET_FILE)"
        raise type(e)(e.errno, why, options.secret_file) from None
    if not secret:
        raise ValueError(f"the file {options.secret_file}, which should hold the group's secret, is empty")
    if len(secret) < LEAST_SECRET_BYTES:
        raise ValueError(
            f"the file {options.secret_file} holds a secret of {len(secret)} bytes. Give at least {LEAST_SECRET_BYTES},"
            " for example what `openssl rand -hex 32` prints."
        )
    return secret


@functools.lru_cache(maxsize=4)  # for several workers of one process
def key_of(secret: bytes, token: str) -> bytes:
    """Return the key of a group with this secret and token."""
    salt = _PURPOSE + token.encode()
    if _is_random(secret):
        return hmac.digest(secret, salt, "sha256")
    return hashlib.scrypt(secret, salt=salt, dklen=32, **_COST)


def _is_random(secret: bytes) -> bool:
    """Return whether a secret looks like 16 random bytes, or their hexadecimal form."""
    try:
        text = secret.decode()
    except UnicodeDecodeError:
        return True
    return len(text) >= 2 * LEAST_SECRET_BYTES and all(c in "0123456789abcdefABCDEF" for c in text)
