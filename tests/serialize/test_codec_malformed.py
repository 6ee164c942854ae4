"""Malformed bodies: the decoder raises CodecError and its memory is bounded."""

import contextlib
import struct
import tracemalloc

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from serialize_helpers import received, slow_codec
from test_codec import values

from telegrad import _core
from telegrad.serialize.tensor_layout import make_codec


class Ref:
    def __init__(self, key):
        self.key = key


def with_refs(codec):
    codec.register(Ref, 1, lambda ref: ref.key, Ref)
    return codec


CodecError = _core.CodecError
CODECS = [with_refs(make_codec()), with_refs(slow_codec())]

tensors = st.builds(
    lambda shape, step, grad: (
        torch.ones([size * step for size in shape])[tuple(slice(None, None, step) for _ in shape)]
        .detach()
        .requires_grad_(grad)
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(1, 2),
    st.booleans(),
)
messages = st.lists(values | tensors | st.builds(Ref, st.integers() | st.text()), max_size=4)


def decodes_or_says_so(codec, body, sizes):
    with contextlib.suppress(CodecError):
        codec.decode(bytes(body), [received(size) for size in sizes])


@settings(max_examples=300, deadline=None)
@given(messages, st.data())
def test_changed_bodies(message, data):
    codec = CODECS[data.draw(st.booleans())]
    body, segments = codec.encode(message)
    body = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(body) - 1, 0)))
        match data.draw(st.sampled_from(["set", "delete", "insert", "cut"])):
            case "set":
                body[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
            case "delete":
                del body[at : at + data.draw(st.integers(1, 4))]
            case "insert":
                body[at:at] = data.draw(st.binary(min_size=1, max_size=4))
            case "cut":
                del body[at:]
    sizes = [size + data.draw(st.sampled_from([0, 0, 0, -1, 1, 100])) for _, size, _ in segments]
    sizes += data.draw(st.lists(st.integers(1, 20), max_size=1))
    decodes_or_says_so(codec, body, [max(size, 0) for size in sizes])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans(), st.lists(st.integers(0, 64), max_size=3))
@example(b"", True, [])
@example(bytes(9) + b"\x01", True, [])
def test_random_bodies(body, use_table, sizes):
    decodes_or_says_so(CODECS[use_table], body, sizes)


def with_tables(main, tables):
    return main + tables + struct.pack("<Q", len(main)) + b"\x01"


def one_tensor(*fields):
    return with_tables(b"\xe0", bytes([1, *fields, 0]))


HUGE = bytes([0xFF] * 8 + [0x7F])  # varint 2**63 - 1

BAD = {
    "empty": b"",
    "only an unknown footer": b"\x05",
    "no value": b"\0",
    "two values": b"\x01\x02\0",
    "unknown tag": b"\xde\0",
    "tuple cut": b"\x82\x01\0",
    "list that claims too much": b"\xca" + HUGE + b"\0",
    "tuple that claims too much": b"\xc9" + HUGE + b"\0",
    "dict that claims too much": b"\xcb" + HUGE + b"\0",
    "string that claims too much": b"\xc7" + HUGE + b"\0",
    "bytes that claim too much": b"\xc8" + HUGE + b"\0",
    "int that claims too much": b"\xc4" + HUGE + b"\0",
    "varint without end": b"\xc3" + b"\xff" * 20 + b"\0",
    "varint of 65 bits": b"\xc3" + b"\xff" * 9 + b"\x02\0",
    "float cut": b"\xc5\0\0\0",
    "string that is not UTF-8": b"\xa1\xff\0",
    "surrogate": b"\xa3\xed\xa0\x80\0",
    "list as a key": b"\xd1\x90\x01\0",
    "tensor that is not there": b"\xe0\0",
    "extension that is not there": b"\xf0\0",
    "tables outside": struct.pack("<Q", 100) + b"\x01",
    "too many tensors": with_tables(b"\0", HUGE + b"\0"),
    "too many extensions": with_tables(b"\0", b"\0" + HUGE),
    "tables with a tail": with_tables(b"\x01", b"\0\0\0"),
    "unknown element type": one_tensor(99, 0, 1, 0),
    "no element type": one_tensor(0, 0, 1, 0),
    "unknown flag": one_tensor(11, 8, 1, 0),
    "int that requires grad": one_tensor(6, 5, 1, 1),
    "too many dimensions": one_tensor(11, 4, 65, *[1] * 65),
    "sizes cut": one_tensor(11, 4, 3, 1),
    "larger than its segment": one_tensor(11, 4, 1, 3),
    "strides reach out": one_tensor(11, 6, 2, 1, 2, 0, 2),
    "memory that its size does not need": one_tensor(11, 4, 1, 0),
    "no memory that its size needs": one_tensor(11, 0, 1, 1),
    "more elements than 63 bits": one_tensor(11, 6, 2, *HUGE, *HUGE, 0, 0),
    "reach beyond 63 bits": one_tensor(11, 6, 2, 3, 3, *HUGE, *HUGE),
    "size beyond 63 bits": one_tensor(11, 4, 1, *[0xFF] * 9, 1),
    "bytes beyond 63 bits": one_tensor(12, 6, 1, *HUGE, 0),
    "contiguous beyond 63 bits": one_tensor(11, 0, 4, 0, *HUGE, *HUGE, 1),
    "extension in no slot": with_tables(b"\xf0", b"\0\x01\x07\x01\x05"),
    "extension without code": with_tables(b"\xf0", b"\0\x01\x00\x55\x05"),
    "extension without value": with_tables(b"\xf0", b"\0\x01\x00\x01"),
    "extension in one slot twice": with_tables(b"\xf0", b"\0\x02\x00\x01\x05\x00\x01\x05"),
    "extension that holds itself": with_tables(b"\xf0", b"\0\x01\x00\x01\xf0"),
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
@pytest.mark.parametrize("which", [0, 1], ids=["table", "hooks"])
def test_each_kind_of_wrong_field(which, body):
    with pytest.raises(CodecError):
        CODECS[which].decode(body, [received(8)] if body[-2:-1] == b"\0" and body.startswith(b"\xe0") else [])


def test_the_same_tensor_with_correct_fields():
    assert CODECS[0].decode(one_tensor(11, 4, 1, 2), [received(8)]).shape == (2,)


def test_segments_and_tensors_are_of_one_number():
    body, _ = CODECS[0].encode([torch.ones(2), torch.ones(2)])
    for count in (0, 1, 3):
        with pytest.raises(CodecError, match="segments"):
            CODECS[0].decode(body, [received(8) for _ in range(count)])


def test_misaligned_memory_is_refused():
    body, _ = CODECS[0].encode(torch.ones(2))
    with pytest.raises(CodecError, match="misaligned"):
        CODECS[0].decode(body, [received(9)[1:]])


def test_nesting_is_bounded():
    with pytest.raises(CodecError, match="nested too deeply"):
        CODECS[0].decode(b"\x81" * 1_000_000 + b"\x01\0", [])


@pytest.mark.parametrize("body", [b"\xca" + HUGE + b"\0", b"\xc4" + HUGE + b"\0", with_tables(b"\0", HUGE + b"\0")])
def test_wrong_lengths_reserve_nothing(body):
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            CODECS[0].decode(body, [])
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_it_is_a_value_error():
    assert issubclass(CodecError, ValueError)
