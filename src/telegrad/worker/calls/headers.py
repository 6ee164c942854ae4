"""Headers of calls, which interceptors add: the metadata of gRPC."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from telegrad.errors import SerializationError

__all__ = ["NO_HEADERS", "Headers", "SentHeaders", "read_headers", "sent_headers"]

Headers: TypeAlias = Mapping[str, str | bytes]
"""Values by name."""

SentHeaders: TypeAlias = dict[str, str | bytes] | None
"""The same in a message; None if there are none."""

NO_HEADERS: Final[Headers] = MappingProxyType({})
MOST_BYTES = 64 << 10


def sent_headers(headers: Headers, call: str) -> SentHeaders:
    """Return the headers of a call as they are sent.

    Args:
        headers: Headers, from an interceptor.
        call: The call, for errors: its function and worker.

    Raises:
        TypeError: A name or a value has another type.
        ValueError: They are too large.
    """
    if not headers:
        return None
    if not isinstance(headers, Mapping):
        raise TypeError(f"the headers of {call} have to be a mapping of names to texts, not {headers!r}")
    size = 0
    for name, value in headers.items():
        if type(name) is not str or type(value) not in (str, bytes):
            raise TypeError(f"a header of {call} has to be a name with a text or bytes, not {name!r}: {value!r}")
        size += len(name.encode()) + len(value.encode() if isinstance(value, str) else value)
    if size > MOST_BYTES:
        raise ValueError(
            f"the headers of {call} have {size} bytes, more than the limit of {MOST_BYTES}. Send large"
            " values as arguments."
        )
    return dict(headers)


def read_headers(received: object) -> Headers:
    """Return received headers.

    Raises:
        SerializationError: They are no headers.
    """
    if received is None:
        return NO_HEADERS
    if type(received) is not dict or any(
        type(name) is not str or type(value) not in (str, bytes) for name, value in received.items()
    ):
        raise SerializationError("a request has malformed headers; do all workers run one version?")
    return MappingProxyType(received)
