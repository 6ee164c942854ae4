"""Tensors in the codec, with torch's C function table and with the Python hooks."""

import gc
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serialize_helpers import Replacer, carry_segments, codec_pair, is_within, received, resized, same, slow_codec
from torch.autograd import forward_ad

from telegrad.errors import SerializationError
from telegrad.serialize.tensor_layout import DTYPE_OF_CODE, make_codec

DTYPES = list(DTYPE_OF_CODE.values())


def filled(shape, dtype, strides=None):
    """A tensor with arbitrary bits (bools only 0 and 1)."""
    tensor = torch.empty_strided(shape, strides, dtype=dtype) if strides else torch.empty(shape, dtype=dtype)
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    raw.copy_(torch.randint(0, 2 if dtype is torch.bool else 120, raw.shape, dtype=torch.uint8))
    return tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_type(codec, dtype):
    tensor = filled((3, 5), dtype)
    assert same(codec_pair(tensor, codec), tensor)


def test_the_table_and_the_hooks_write_the_same_bytes():
    tensors = [filled((3, 5), dtype) for dtype in DTYPES]
    tensors += [torch.ones(4, 6).t(), torch.ones(2, requires_grad=True), torch.ones(0, 3), torch.ones(100)[::7]]
    one, other = make_codec().encode(tensors), slow_codec().encode(tensors)
    assert one[0] == other[0]
    assert [size for _, size, _ in one[1]] == [size for _, size, _ in other[1]]


@st.composite
def layouts(draw):
    """(shape, strides) with a storage of a few hundred elements at most."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    strides = draw(st.lists(st.integers(0, 20), min_size=len(shape), max_size=len(shape)))
    return tuple(shape), tuple(strides)


@settings(deadline=None)
@given(layouts(), st.sampled_from(DTYPES), st.booleans())
def test_any_layout_keeps_its_elements(layout, dtype, use_table):
    shape, strides = layout
    tensor = filled((300,), dtype).as_strided(shape, strides, 3)
    arrived = codec_pair(tensor, make_codec() if use_table else slow_codec())
    assert arrived.dtype == dtype
    assert arrived.shape == shape
    assert same(arrived.contiguous(), tensor.contiguous())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(2, 0, 3),
        torch.empty_strided((1, 3), (77, 1)),
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(24.0).view(2, 3, 4)[1],
        torch.arange(10.0)[::2],
        torch.arange(3.0).expand(5, 3),
        torch.ones((1,) * 64),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)[:5]}{tensor.stride()[:5]}",
)
def test_shape_and_strides_are_kept(codec, tensor):
    tensor = tensor.clone() if tensor.is_contiguous() else tensor
    assert same(codec_pair(tensor, codec), tensor)


def test_a_view_sends_its_own_span(codec):
    base = torch.arange(1_000_000.0)
    _, [(address, nbytes, _)] = codec.encode(base[10:14])
    assert (address, nbytes) == (base.data_ptr() + 40, 16)
    _, [(_, nbytes, _)] = codec.encode(base.view(1000, 1000).t()[:, 3:5])
    assert nbytes == 8000


def test_a_view_full_of_holes_is_sent_dense(codec):
    column = torch.arange(1_000_000.0).view(1000, 1000)[:, 7]
    body, segments = codec.encode(column)
    assert segments[0][1] == 4000
    arrived = codec.decode(body, carry_segments(segments))
    assert torch.equal(arrived, column)
    assert arrived.is_contiguous()


def test_no_element_is_copied_on_either_side(codec):
    tensor = torch.arange(6.0)
    body, [(address, nbytes, _)] = codec.encode([tensor])
    assert address == tensor.data_ptr()
    memory = received(nbytes)
    [arrived] = codec.decode(body, [memory])
    memory[:] = 0
    assert arrived.tolist() == [0] * 6
    arrived.fill_(1)
    assert memory.any()


def test_requires_grad_arrives_as_a_leaf(codec):
    weight = torch.ones(3, requires_grad=True)
    leaf, middle, plain = codec_pair((weight, weight * 2, torch.ones(3)), codec)
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert middle.requires_grad
    assert middle.is_leaf
    assert not plain.requires_grad
    (leaf * middle).sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes_change_nothing(codec, mode):
    weight = torch.ones(3, requires_grad=True)
    with mode():
        arrived = codec_pair(weight, codec)
    assert same(arrived, weight)


def test_one_tensor_twice_is_one_tensor_on_the_receiver(codec):
    tensor = torch.ones(3)
    body, segments = codec.encode([tensor, {"again": tensor}])
    assert len(segments) == 1
    first, second = codec.decode(body, carry_segments(segments))
    assert first is second["again"]


def test_tensors_over_the_same_memory_are_left_to_pickle(codec):
    base = torch.arange(10.0)
    assert codec.encode([base, base[2:4]]) is None
    assert codec.encode([base[:6], base[5:]]) is None
    assert codec.encode([base, base.detach()]) is None
    left, right = codec_pair([base[:5], base[5:]], codec)
    assert (left.tolist(), right.tolist()) == ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])


def test_many_tensors(codec):
    tensors = [torch.full((i % 5,), float(i)) for i in range(300)]
    arrived = codec_pair([tensors, tensors[7], tensors[299]], codec)
    assert same(arrived[0], tensors)
    assert arrived[1] is arrived[0][7]
    assert arrived[2] is arrived[0][299]


class Subclass(torch.Tensor): ...


ODD = {
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "meta": lambda: torch.empty(2, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "subclass": lambda: torch.ones(2).as_subclass(Subclass),
    "uint4": lambda: torch.empty(2, dtype=torch.uint4),
    "int3": lambda: torch.empty(2, dtype=torch.int3),
    "bits8": lambda: torch.empty(2, dtype=torch.bits8),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_tensors_that_are_more_than_elements_are_left_to_pickle(codec, make):
    try:
        odd = make()
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        pytest.skip(f"this torch has no such tensor: {error}")
    assert codec.encode(odd) is None
    assert codec.encode([torch.ones(2), odd]) is None


def test_owner_keeps_the_memory_when_the_tensor_gets_another(codec):
    tensor = torch.arange(1000.0)
    [segment] = codec.encode(tensor)[1]
    tensor.data = torch.zeros(1)
    gc.collect()
    torch.full((1000,), 7.0)  # would take the freed memory
    [arrived] = carry_segments([segment])
    assert arrived.view("float32").tolist() == list(range(1000))


class Memory(bytearray):
    """Received memory with an observable end."""


def test_the_tensor_keeps_its_memory_and_releases_it_at_the_end(codec):
    body, segments = codec.encode(torch.ones(16))
    memory = Memory(segments[0][1])
    gone = weakref.ref(memory)
    arrived = codec.decode(body, [memory])
    with pytest.raises(BufferError):
        memory.append(0)
    del memory
    view = arrived[3:]
    del arrived
    gc.collect()
    assert gone() is not None
    assert view.tolist() == [0] * 13
    del view
    gc.collect()
    assert gone() is None


def test_memory_is_released_when_decoding_fails(codec):
    body, segments = codec.encode([torch.ones(16), torch.ones(4)])
    memories = [Memory(nbytes) for _, nbytes, _ in segments]
    gone = weakref.ref(memories[0])
    with pytest.raises(ValueError, match="malformed"):
        codec.decode(body, memories[:1])
    memories.clear()
    gc.collect()
    assert gone() is None


def test_memory_may_be_released_on_a_thread_of_torch(codec):
    """Autograd's threads drop tensors without holding the GIL."""
    body, segments = codec.encode(torch.ones(1000))
    for _ in range(5):
        memory = Memory(segments[0][1])
        gone = weakref.ref(memory)
        weight = torch.ones(1000, requires_grad=True)
        product = weight * codec.decode(body, [memory])  # the graph is the tensor's last holder
        del memory
        thread = threading.Thread(target=product.sum().backward)
        thread.start()
        thread.join()
        del product
        assert gone() is None


def test_segments_must_be_writable_memory(codec):
    body, _ = codec.encode(torch.ones(2))
    with pytest.raises(BufferError):
        codec.decode(body, [bytes(8)])
    with pytest.raises(TypeError):
        codec.decode(body, [None])


def test_a_function_mode_that_changes_the_list_is_noticed():
    """Reading a tensor can run Python code with any effect."""
    victim = [torch.ones(2), torch.ones(2), torch.ones(2)]

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            victim.clear()
            return func(*args, **(kwargs or {}))

    with Mode(), pytest.raises(RuntimeError, match="changed size"):
        slow_codec().encode(victim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.complex64], ids=str)
def test_a_segment_is_memory_of_its_owner_while_another_thread_replaces_it(codec, dtype):
    for call in range(1, 40):
        tensor = torch.ones(1000, dtype=dtype)
        with Replacer(tensor, [call]) as mode:
            [(address, nbytes, owner)] = codec.encode(tensor)[1]
        assert nbytes == 1000 * dtype.itemsize
        assert is_within(address, nbytes, owner), call
        if mode.called < call:
            return
    raise AssertionError("the last call was not reached")


def test_memory_that_is_replaced_all_the_time_is_refused(codec):
    tensor = torch.ones(1000)
    with Replacer(tensor, range(1000)), pytest.raises(SerializationError, match="another thread replaces its memory"):
        codec.encode(tensor)


SMALLER = {
    "freed": (lambda: resized(torch.ones(3), 0), "0 of 12 bytes"),
    "freed, large": (lambda: resized(torch.ones(3000), 0), "0 of 12000 bytes"),
    "shrunk": (lambda: resized(torch.ones(2048), 4096), "4096 of 8192 bytes"),
    "the end of a shrunk one": (lambda: resized(torch.ones(20)[10:], 40), "40 of 80 bytes"),
    "column": (lambda: resized(torch.ones(1000, 100)[:, 3], 4096), "4096 of 399616 bytes"),
    "bytes": (lambda: resized(torch.ones(9, dtype=torch.uint8), 8), "8 of 9 bytes"),
}


@pytest.mark.parametrize(("make", "text"), SMALLER.values(), ids=SMALLER)
def test_a_tensor_larger_than_its_storage_is_refused(codec, make, text):
    for value in (make(), [torch.ones(2), make()]):
        with pytest.raises(SerializationError, match=rf"its storage has {text}"):
            codec.encode(value)


def test_without_elements_a_storage_may_be_empty(codec):
    assert codec_pair(resized(torch.ones(3)[3:], 0), codec).shape == (0,)
    assert codec_pair(resized(torch.ones(0, 3), 0), codec).shape == (0, 3)


def test_a_tensor_with_a_tangent_is_refused(codec):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        for value in (dual, [torch.ones(2), dual * 2], dual.clone().requires_grad_()):
            with pytest.raises(RuntimeError, match="its tangent would be lost"):
                codec.encode(value)
        assert same(codec_pair(torch.ones(2), codec), torch.ones(2))
        assert codec.encode(torch.eye(2).to_sparse()) is None
    assert same(codec_pair(dual, codec), torch.ones(2))


def test_zeros_without_memory(codec):
    zeros = torch._efficientzerotensor(2, 3)
    assert same(codec_pair([zeros, torch.ones(2)], codec), [torch.zeros(2, 3), torch.ones(2)])
