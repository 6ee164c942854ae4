"""Types of higher layers that are sent as plain values."""

import sys

import pytest
import torch
from serialize_helpers import codec_pair

from telegrad.serialize.tensor_layout import make_codec


class Ref:
    def __init__(self, key):
        self.key = key


class Pair:
    def __init__(self, left, right):
        self.left, self.right = left, right


@pytest.fixture
def packed():
    return []


@pytest.fixture
def codec(packed):
    codec = make_codec()

    def pack(ref):
        packed.append(ref)
        return ref.key

    codec.register(Ref, 1, pack, Ref)
    codec.register(Pair, 2, lambda pair: (pair.left, pair.right), lambda halves: Pair(*halves))
    return codec


def test_travels_as_what_pack_made_of_it(codec):
    arrived = codec_pair([1, Ref(("w0", 7)), {"k": Ref("x")}], codec)
    assert arrived[1].key == ("w0", 7)
    assert arrived[2]["k"].key == "x"


def test_the_same_object_twice_is_packed_once_and_arrives_as_one(codec, packed):
    ref = Ref(1)
    arrived = codec_pair([ref, (ref, ref)], codec)
    assert packed == [ref]
    assert arrived[0] is arrived[1][0] is arrived[1][1]


def test_nothing_is_packed_when_the_message_is_not_plain(codec, packed):
    assert codec.encode([Ref(1), object()]) is None
    base = torch.arange(4.0)
    assert codec.encode([Ref(1), base, base[1:]]) is None
    assert packed == []


def test_packed_values_may_hold_tensors_and_others(codec):
    tensor = torch.arange(3.0)
    inner = Ref(tensor)
    arrived = codec_pair([Pair(inner, [Pair(inner, 5)]), tensor, inner], codec)
    assert arrived[0].left is arrived[0].right[0].left is arrived[2]
    assert arrived[2].key is arrived[1]
    assert arrived[0].right[0].right == 5


def test_a_cycle_of_packed_values_is_an_error(codec):
    pair = Pair(None, None)
    pair.left = pair
    with pytest.raises(TypeError, match="circle"):
        codec.encode(pair)


def test_a_packed_value_must_be_plain(codec):
    with pytest.raises(TypeError, match=r"holds object, which is not"):
        codec.encode(Ref(object()))
    with pytest.raises(TypeError, match="Ref was packed"):
        codec.encode(Ref(torch.eye(2).to_sparse()))


def test_packed_tensors_must_not_share_memory(codec):
    tensor = torch.arange(3.0)
    with pytest.raises(TypeError, match="shares tensor memory"):
        codec.encode([tensor, Ref(tensor[1:])])


def test_what_pack_and_unpack_raise_is_passed_on(codec):
    class Angry: ...

    def refuse(_):
        raise LookupError("no")

    codec.register(Angry, 3, refuse, refuse)
    with pytest.raises(LookupError):
        codec.encode([Angry()])
    calm = make_codec()
    calm.register(Angry, 3, lambda _: 1, str)
    body, _ = calm.encode(Angry())
    with pytest.raises(LookupError):
        codec.decode(body, [])


def test_an_unknown_code_is_a_clear_error(codec):
    body, _ = codec.encode(Ref(1))
    with pytest.raises(ValueError, match="extension 1 is not registered"):
        make_codec().decode(body, [])


def test_only_exactly_the_type(codec):
    class Special(Ref): ...

    assert codec.encode(Special(1)) is None


def test_types_and_codes_are_taken_once(codec):
    for kind, code in ((Ref, 9), (Pair, 9), (object, 1), (int, 9), (dict, 9)):
        with pytest.raises(ValueError, match=r"type|code"):
            codec.register(kind, code, str, str)


def test_packing_may_encode_another_message(codec):
    class Nested: ...

    codec.register(Nested, 3, lambda _: codec.encode([1, Ref(2)])[0], lambda body: codec.decode(body, []))
    assert codec_pair((Nested(),), codec)[0][1].key == 2


def test_packing_may_register_types(codec):
    class Greedy: ...

    def pack(_):
        for code in range(100, 200):
            codec.register(type(f"T{code}", (), {}), code, str, str)
        return "done"

    codec.register(Greedy, 3, pack, str)
    assert codec_pair([Greedy()], codec) == ["done"]


def test_many_of_them(codec):
    refs = [Ref(i) for i in range(1000)]
    arrived = codec_pair(refs, codec)
    assert [ref.key for ref in arrived] == list(range(1000))


def test_no_reference_is_left_behind(codec):
    ref = Ref("key")
    before = sys.getrefcount(ref)
    codec.register(Int := type("Int", (), {}), 3, lambda _: object(), str)
    for _ in range(10):
        codec.encode([ref, Pair(ref, 1)])
        with pytest.raises(TypeError):
            codec.encode([ref, Int()])
    assert sys.getrefcount(ref) <= before + 20  # what `packed` holds
