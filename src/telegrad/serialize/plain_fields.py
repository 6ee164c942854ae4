"""Texts, numbers and bytes as one text of bytes, without pickle."""

import struct
from collections.abc import Sequence
from typing import TypeAlias

from telegrad.errors import SerializationError

__all__ = ["Field", "decode_fields", "encode_fields"]

Field: TypeAlias = str | int | bytes | None

_HEAD = struct.Struct("<cQ")  # kind, length


def encode_fields(fields: Sequence[Field]) -> bytes:
    """Encode fields. A text may have lone surrogates, as in names of files."""
    out = []
    for field in fields:
        kind, data = b"n", b""
        if isinstance(field, str):
            kind, data = b"s", field.encode(errors="surrogatepass")
        elif isinstance(field, bytes):
            kind, data = b"b", field
        elif field is not None:
            kind, data = b"i", str(field).encode()
        out += [_HEAD.pack(kind, len(data)), data]
    return b"".join(out)


def decode_fields(data: bytes | bytearray | memoryview) -> list[Field]:
    """Decode the output of `encode_fields`.

    Raises:
        SerializationError: The data is malformed.
    """
    fields: list[Field] = []
    with memoryview(data) as view:
        at = 0
        try:
            while at < len(view):
                kind, length = _HEAD.unpack_from(view, at)
                at += _HEAD.size
                if length > len(view) - at:
                    raise SerializationError("an exception came truncated")
                part = bytes(view[at : at + length])
                at += length
                match kind:
                    case b"s":
                        fields.append(part.decode(errors="surrogatepass"))
                    case b"b":
                        fields.append(part)
                    case b"i":
                        fields.append(int(part[:20]))
                    case b"n":
                        fields.append(None)
                    case _:
                        raise SerializationError("an exception came with a field of an unknown kind")
        except (struct.error, ValueError) as error:
            raise SerializationError("an exception came malformed") from error
    return fields
