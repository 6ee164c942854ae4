"""Values left to pickle: sharing, out-of-band buffers, registered types, errors."""

import collections
import copyreg
import dataclasses
import enum
import gc
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
from serialize_helpers import carry_segments, pickle_pair, received

from telegrad.errors import SerializationError
from telegrad.serialize.pickling import Serializer

dumps, loads = Serializer().dumps, Serializer().loads


class Ref:
    def __init__(self, key):
        self.key = key

    def __reduce__(self):
        raise AssertionError("pickled without its reducer")


class Color(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


class BrokenRepr:
    def __repr__(self):
        raise ZeroDivisionError


@dataclasses.dataclass
class Box:
    content: object


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset("ab"),
        Color.RED,
        Point(1, 2),
        Box([1]),
        range(3),
        slice(1, 2),
        ...,
        bytearray(b"abc"),
        torch.Size([1, 2]),
        torch.float16,
        torch.device("cpu"),
        torch.add,
        torch.nn.functional.relu,
        int,
        len,
        Box(Box(None)),
        NotImplemented,
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_values_of_other_types(value):
    arrived = pickle_pair(value)
    assert type(arrived) is type(value)
    assert arrived == value


def test_sharing_and_cycles_are_kept():
    shared = [1]
    ring = {"shared": shared, "again": shared}
    ring["self"] = ring
    arrived = pickle_pair(ring)
    assert arrived["shared"] is arrived["again"]
    assert arrived["self"] is arrived


def test_nothing_out_of_band_for_small_things():
    body, segments = dumps([Box(1), np.arange(3)])
    assert segments == []
    assert loads(body, [])[1].tolist() == [0, 1, 2]


def test_numpy_arrays_travel_out_of_band():
    array = np.arange(1000.0)
    body, [(address, nbytes, _)] = dumps({"a": array})
    assert len(body) < 500
    assert (address, nbytes) == (array.ctypes.data, 8000)
    memory = received(nbytes)
    arrived = loads(body, [memory])["a"]
    memory[:] = 0
    assert not arrived.any()
    arrived[0] = 1
    assert memory.any()
    np.testing.assert_array_equal(pickle_pair(np.asfortranarray(array.reshape(50, 20))), array.reshape(50, 20))


def test_read_only_arrays_stay_read_only():
    array = np.arange(1000.0)
    array.flags.writeable = False
    arrived = pickle_pair(array)
    assert arrived.tolist() == array.tolist()
    assert not arrived.flags.writeable


def test_arrays_and_tensors_in_one_message():
    value = [np.arange(500.0), torch.arange(5.0), np.arange(600.0), torch.arange(6.0)]
    assert [list(item) for item in pickle_pair(Box(value)).content] == [list(item) for item in value]


def test_a_segment_owner_keeps_its_buffer():
    array = np.arange(1000.0)
    _, [segment] = dumps([array])
    array = None
    gc.collect()
    np.full(1000, 7.0)
    [arrived] = carry_segments([segment])
    assert arrived.view(float).tolist() == list(range(1000))


# Registered types


@pytest.fixture
def packed():
    return []


@pytest.fixture
def serializer(packed):
    serializer = Serializer()

    def pack(ref):
        packed.append(ref)
        return ref.key

    serializer.register(Ref, 1, pack, Ref)
    return serializer


def test_registered_types_anywhere_in_the_graph(serializer):
    ref = Ref(torch.arange(3.0))
    arrived = pickle_pair(Box([ref, {"k": {1: ref}}, (lambda: ref)]), serializer).content
    assert arrived[0].key.tolist() == [0, 1, 2]
    assert arrived[0] is arrived[1]["k"][1] is arrived[2]()


def test_registered_types_within_each_other(serializer):
    inner = Ref("inner")
    arrived = pickle_pair(Box([Ref([inner, 1]), inner]), serializer).content
    assert arrived[0].key[0] is arrived[1]


def test_nothing_is_packed_when_the_rest_cannot_be_pickled(serializer, packed):
    with pytest.raises(SerializationError):
        serializer.dumps([Ref(1), threading.Lock()])
    assert packed == []


def test_what_pack_and_unpack_raise_is_passed_on(serializer):
    class Angry: ...

    def refuse(_):
        raise LookupError("no")

    serializer.register(Angry, 2, refuse, refuse)
    with pytest.raises(LookupError):
        serializer.dumps(Angry())
    calm = Serializer()
    calm.register(Angry, 2, lambda _: 1, str)
    with pytest.raises(LookupError):
        pickle_pair_between(calm, serializer, Angry())


def pickle_pair_between(sender, receiver, value):
    body, segments = sender.dumps(value)
    return receiver.loads(body, carry_segments(segments))


def test_a_type_that_the_receiver_has_not_registered(serializer):
    with pytest.raises(SerializationError, match="type 1, which is not registered here"):
        pickle_pair_between(serializer, Serializer(), [Ref(1)])


def test_codec_and_pickle_share_the_table(serializer):
    body, _ = serializer.codec.encode([Ref(1)])
    assert serializer.codec.decode(body, [])[0].key == 1
    with pytest.raises(ValueError, match="type"):
        serializer.register(Ref, 3, str, str)
    with pytest.raises(ValueError, match="code"):
        serializer.register(Box, 1, str, str)


def test_reducers_of_one_worker_and_of_all(serializer):
    class Local: ...

    class Everywhere: ...

    serializer.register_reducer(Local, lambda _: (str, ("local",)))
    serializer.register_reducer(Local, lambda _: (str, ("late",)))
    copyreg.pickle(Everywhere, lambda _: (str, ("everywhere",)))
    try:
        assert pickle_pair([Local(), Everywhere()], serializer) == ["local", "everywhere"]
    finally:
        del copyreg.dispatch_table[Everywhere]


class Nesting:
    """Object that pickles a message while it is pickled."""

    def __getstate__(self):
        body, segments = dumps(Box([torch.ones(2), "inner"]))
        return body, [bytearray(memory) for memory in carry_segments(segments)]

    def __setstate__(self, state):
        self.inner = loads(*state).content


def test_messages_nest():
    arrived = pickle_pair([torch.zeros(3), Nesting(), torch.ones(3)])
    assert arrived[0].tolist() == [0, 0, 0]
    assert arrived[1].inner[0].tolist() == [1, 1]
    assert arrived[2].tolist() == [1, 1, 1]


def test_many_threads_at_once(serializer):
    failures = []

    def work(number):
        try:
            for i in range(50):
                value = [torch.full((3,), float(number)), Ref((number, i)), Nesting(), np.full(200, number)]
                arrived = pickle_pair(Box(value), serializer).content
                assert arrived[0].tolist() == [number] * 3
                assert arrived[1].key == (number, i)
                assert arrived[3].tolist() == [number] * 200
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# Errors


class Holder:
    def __init__(self, **parts):
        self.__dict__.update(parts)


def closure_over(lock):
    return lambda: lock


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ((1, [threading.Lock()]), "value[1][0]"),
        ({"a": {"b": threading.Lock()}}, "value['a']['b']"),
        (Holder(part=Holder(lock=threading.Lock())), "value.part.lock"),
        ([closure_over(threading.Lock())], "value[0] (its variable lock)"),
        ({BrokenRepr(): threading.Lock()}, "value[<BrokenRepr>]"),
        (Holder(f=1).__init__.__get__(Holder(lock=threading.Lock())), "value.__self__.lock"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_an_unpicklable_part_is_named(value, path):
    with pytest.raises(SerializationError) as caught:
        dumps(value)
    assert "cannot pickle '_thread.lock' object" in str(caught.value)
    assert f"(at {path}, of type _thread.lock)" in str(caught.value)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, RuntimeError)


def test_the_name_in_errors_is_the_callers():
    with pytest.raises(SerializationError, match=r"at args\[0\]"):
        dumps([threading.Lock()], "args")


@pytest.mark.parametrize("make", [torch.futures.Future, lambda: torch._C.Future([])], ids=["public", "native"])
def test_futures_raise_torchs_error(make):
    with pytest.raises(RuntimeError, match=r"^Can not pickle torch\.futures\.Future \(at value\[1\]"):
        dumps([1, make()])


def test_nesting_without_end_is_an_error():
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(SerializationError, match="nested too deeply"):
        dumps(value)


def test_what_the_values_own_methods_raise_is_passed_on():
    class Own:
        def __getstate__(self):
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        dumps(Own())


def gone():
    """Function that is removed before the message arrives."""


class Gone:
    def method(self): ...


def test_a_missing_function_gets_torchs_hint(monkeypatch):
    body, _ = dumps(gone)
    monkeypatch.delitem(globals(), "gone")
    with pytest.raises(SerializationError, match="RPC pickler does not serialize") as caught:
        loads(body, [])
    assert isinstance(caught.value, AttributeError)
    assert str(caught.value).endswith("callee modules.")


def test_a_missing_method_gets_the_hint_too(monkeypatch):
    body, _ = dumps([Gone().method])
    monkeypatch.delattr(Gone, "method")
    with pytest.raises(AttributeError, match="RPC pickler does not serialize"):
        loads(body, [])


def test_a_missing_module_gets_the_hint(monkeypatch):
    body, _ = dumps(Box)
    with pytest.raises(SerializationError, match=r"no_such.*\n? Default RPC pickler does not") as caught:
        loads(body.replace(__name__.encode(), b"no_such".ljust(len(__name__), b"_")), [])
    assert isinstance(caught.value, ImportError)


def test_truncated_and_malformed_bodies():
    body, segments = dumps([torch.ones(2), "x" * 50])
    for length in range(len(body)):
        with pytest.raises(SerializationError):
            loads(body[:length], carry_segments(segments))
    with pytest.raises(SerializationError, match="0 of 1 segments"):
        loads(body, [])


def test_placeholders_mean_nothing_outside_of_a_message():
    body, segments = dumps(torch.ones(2))
    with pytest.raises(SerializationError, match="only be unpickled with the call"):
        pickle.loads(body)
    assert segments


def test_memory_lives_as_long_as_tensors_over_it():
    class Memory(bytearray): ...

    body, segments = dumps([torch.ones(1000), {1}])
    memory = Memory(segments[0][1])
    alive = weakref.ref(memory)
    arrived = loads(body, [memory])
    del memory
    gc.collect()
    assert alive() is not None
    del arrived
    gc.collect()
    assert alive() is None


def test_an_error_of_the_value_names_its_place():
    module = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    text = r"(?s)only supported through state_dict.*\(at value\['m'\]\[1\], of type .*ParametrizedLinear\)"
    with pytest.raises(SerializationError, match=text) as info:
        dumps({"m": [1, module]})
    assert type(info.value) is SerializationError
