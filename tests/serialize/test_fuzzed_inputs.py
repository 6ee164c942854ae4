"""Kept inputs of the fuzzers in csrc/fuzz/python, with torch's tensors."""

import contextlib
from pathlib import Path

import pytest
from serialize_helpers import received, slow_codec

from telegrad import _core
from telegrad.serialize.tensor_layout import make_codec

CORPUS = Path(__file__).parents[2] / "csrc" / "fuzz" / "corpus"
CODECS = {"torch's table": make_codec(), "functions": slow_codec()}


def inputs(target: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


def parts(data: bytes) -> tuple[bytes, list[int], bool]:
    """Return body, sizes of segments, and whether tensors are wrapped.

    The layout of the input is that of codec_fuzz.cc.
    """
    flags, count = (*data[:2], 0, 0)[:2]
    sizes, rest = [], data[2:]
    for _ in range(count & 7):
        sizes.append(int.from_bytes(rest[:2], "little"))
        rest = rest[2:]
    return rest, sizes, bool(flags & 1)


@pytest.mark.parametrize("codec", CODECS)
def test_values(codec: str) -> None:
    decoded = 0
    for data in inputs("codec"):
        body, sizes, wraps = parts(data)
        with contextlib.suppress(_core.CodecError):
            value = CODECS[codec].decode(body, [received(size) for size in sizes], tuple if wraps else None)
            CODECS[codec].encode(value)
            decoded += 1
    assert decoded > 0


def test_metadata() -> None:
    decoded = 0
    for data in inputs("metadata"):
        with contextlib.suppress(_core.CodecError):
            make_codec().decode(data, [])
            decoded += 1
    assert decoded > 0
