"""Plain values in the codec, and values that it leaves to pickle."""

import gc
import sys
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serialize_helpers import codec_pair, same

from telegrad.serialize.tensor_layout import make_codec

CODEC = make_codec()

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**66), 2**66)
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
)
keys = st.integers() | st.text() | st.booleans() | st.none() | st.binary() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=20)
        | st.lists(inner, max_size=20).map(tuple)
        | st.dictionaries(keys, inner, max_size=12)
    ),
    max_leaves=60,
)


@given(values)
def test_any_plain_value_comes_back_equal_and_of_the_same_types(value):
    assert same(codec_pair(value, CODEC), value)


@pytest.mark.parametrize(
    "value",
    [
        *(
            sign * (2**power + step)
            for power in (0, 7, 8, 31, 32, 62, 63, 64, 1000)
            for step in (-1, 0, 1)
            for sign in (1, -1)
        ),
        "",
        "a" * 31,
        "a" * 32,
        "é" * 16,
        "\0",
        "\U0001f600" * 1000,
        b"",
        b"x" * 5000,
        -0.0,
        float("inf"),
        *((0,) * n for n in (0, 15, 16, 300)),
        *([0] * n for n in (0, 15, 16, 300)),
        *({i: i for i in range(n)} for n in (0, 7, 8, 300)),
        [(), (), "s", "s"],
        {(1, "a"): [None], False: True},
    ],
    ids=lambda value: f"{type(value).__name__}-{str(value)[:12]!r}",
)
def test_values_at_the_edges_of_their_encodings(value):
    assert same(codec_pair(value, CODEC), value)


def test_a_body_larger_than_any_buffer_on_the_stack():
    value = [("key" * 10, i, float(i)) for i in range(50_000)]
    assert codec_pair(value, CODEC) == value


def test_a_common_call_is_a_few_bytes():
    body, segments = CODEC.encode(((7,), {}))
    assert len(body) <= 6
    assert segments == []


def test_dict_keeps_its_order():
    assert list(codec_pair({"b": 1, "a": 2, "c": 3}, CODEC)) == ["b", "a", "c"]


class Int(int): ...


class Dict(dict): ...


class Unknown: ...


@pytest.mark.parametrize(
    "value",
    [
        Int(3),
        Dict(),
        Unknown(),
        {1},
        frozenset(),
        bytearray(b"x"),
        range(3),
        len,
        int,
        ...,
        "\ud800",
        type("N", (tuple,), {})((1,)),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_values_that_are_not_exactly_plain_are_left_to_pickle(value):
    assert CODEC.encode(value) is None
    assert CODEC.encode([1, ("a", {"b": value})]) is None


def test_a_container_met_twice_is_left_to_pickle():
    inner = [1]
    assert CODEC.encode((inner, inner)) is None
    table = {}
    assert CODEC.encode([table, {"again": table}]) is None
    pair = ([1], 2)
    assert CODEC.encode([pair, pair]) is None


def test_a_cycle_is_left_to_pickle():
    ring = []
    ring.append(ring)
    assert CODEC.encode(ring) is None
    table = {}
    table["self"] = (table,)
    assert CODEC.encode(table) is None


def test_equal_containers_are_not_the_same():
    assert codec_pair(([1], [1], {}, {}), CODEC) == ([1], [1], {}, {})


def test_doubling_tuples_do_not_explode():
    value = (1.5, "x")
    for _ in range(40):
        value = (value, value)
    assert CODEC.encode(value) is None


def test_one_long_string_met_often_is_left_to_pickle():
    text = "x" * 100_000
    assert CODEC.encode([text] * 10) is None
    assert codec_pair([text], CODEC) == [text]


def test_small_constants_may_repeat():
    size = (3, 4)
    assert codec_pair([size, size, size], CODEC) == [(3, 4)] * 3


def test_nesting_has_a_limit_in_encoder_and_decoder():
    def nested(depth):
        value = []
        for _ in range(depth - 1):
            value = [value]
        return value

    assert codec_pair(nested(64), CODEC) == nested(64)
    assert CODEC.encode(nested(65)) is None
    deeper = make_codec(max_depth=100)
    assert codec_pair(nested(100), deeper) == nested(100)
    body, _ = deeper.encode(nested(100))
    with pytest.raises(ValueError, match="nested too deeply"):
        CODEC.decode(body, [])


def test_encoding_leaves_no_reference_behind():
    value = [str(i) * 3 for i in range(5)]
    before = [sys.getrefcount(item) for item in value]
    for _ in range(100):
        CODEC.encode((value, {"k": value[0]}))
        CODEC.encode((value, Unknown()))
    assert [sys.getrefcount(item) for item in value] == before


def test_body_may_be_any_buffer():
    body, _ = CODEC.encode([1, "two"])
    assert CODEC.decode(bytearray(body), ()) == [1, "two"]
    assert CODEC.decode(memoryview(b"xx" + body)[2:], []) == [1, "two"]


def test_a_codec_in_a_cycle_is_collected():
    class Owner:
        def __init__(self):
            self.codec = make_codec()
            self.codec.register(Unknown, 1, self.pack, self.pack)

        def pack(self, obj):
            return 1

    owner = Owner()
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None


@settings(max_examples=50)
@given(st.lists(st.text(), max_size=30))
def test_decoded_strings_do_not_depend_on_the_body(texts):
    body, _ = CODEC.encode(texts)
    scratch = bytearray(body)
    decoded = CODEC.decode(scratch, [])
    scratch[:] = bytes(len(scratch))
    assert decoded == texts
