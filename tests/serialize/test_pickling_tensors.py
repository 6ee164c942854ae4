"""Tensors in pickled values: out-of-band memory, sharing, no unused bytes."""

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serialize_helpers import Replacer, bits, is_within, pickle_pair, resized, same
from torch.autograd import forward_ad

from telegrad.errors import SerializationError
from telegrad.serialize.pickling import Serializer
from telegrad.serialize.tensor_layout import DTYPE_OF_CODE

dumps = Serializer().dumps


def sent(value):
    """Return the bytes of tensor memory in a message."""
    return sum(nbytes for _, nbytes, _ in dumps(value)[1])


def pair(value):
    """Send a value together with an object that only pickle encodes."""
    return pickle_pair((value, {0}))[0]


@pytest.mark.parametrize("dtype", DTYPE_OF_CODE.values(), ids=str)
def test_every_element_type(dtype):
    tensor = torch.empty(3, 5, dtype=dtype)
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(1)
    assert same(pair(tensor), tensor)


def test_memory_is_out_of_band():
    body, segments = dumps({"deep": [{"down": torch.ones(10_000)}], "set": {1}})
    assert len(body) < 600
    assert [nbytes for _, nbytes, _ in segments] == [40_000]


def test_views_share_memory_on_the_receiver():
    base = torch.arange(10.0)
    a, b, c = pair([base, base[2:5], base.view(2, 5).t()])
    a[3] = 100
    assert b.tolist() == [2, 100, 4]
    assert c[3, 0] == 100


def test_overlapping_views_send_their_union_and_no_more():
    base = torch.arange(1_000_000.0)
    value = [base[100:200], base[150:250]]
    assert sent(value) <= 600 + 16
    left, right = pair(value)
    left[50] = -1
    assert right[0] == -1
    assert left.tolist() == [*range(100, 150), -1, *range(151, 200)]


def test_views_far_apart_are_sent_without_the_memory_between():
    base = torch.arange(1_000_000.0)
    assert sent([base[:2], base[-2:]]) == 16
    assert [view.tolist() for view in pair([base[:2], base[-2:]])] == [[0, 1], [999_998, 999_999]]


def test_columns_of_a_matrix_are_sent_alone():
    matrix = torch.arange(100_000.0).view(1000, 100)
    columns = [matrix[:, 3], matrix[:, 50], matrix[:, 3]]
    assert sent(columns[:2]) == 8000
    assert sent([columns[0], columns[2]]) == 4000
    for ours, theirs in zip(columns, pair(columns), strict=True):
        assert torch.equal(ours, theirs)
    a, b = pair([columns[0], columns[2]])
    a.zero_()
    assert not b.any()


def test_columns_that_cross_keep_their_sharing():
    matrix = torch.arange(100_000.0).view(1000, 100)
    column, row = pair([matrix[:, 3], matrix[500]])
    column[500] = -7
    assert row[3] == -7
    assert column[499] == 49_903


def test_views_of_different_types_share():
    base = torch.arange(6, dtype=torch.int64)
    whole, parts, byte = pair([base, base.view(torch.int32)[3:7], base.view(torch.uint8)[17:19]])
    whole.fill_(-1)
    assert parts.tolist() == [-1] * 4
    assert byte.tolist() == [255] * 2


@st.composite
def families(draw):
    """Views of one storage."""
    base = torch.arange(60.0)
    views = []
    for _ in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        strides = draw(st.lists(st.integers(0, 6), min_size=len(shape), max_size=len(shape)))
        views.append(base.as_strided(shape, strides, draw(st.integers(0, 5))))
    return views


@settings(deadline=None, max_examples=200)
@given(families(), st.data())
def test_any_views_keep_elements_and_sharing(views, data):
    arrived = pair(views)
    assert all(map(torch.equal, views, arrived))
    victim = data.draw(st.integers(0, len(views) - 1))
    elements = views[victim].numel()
    if elements and elements == torch.unique(views[victim]).numel():  # one that meets itself may be sent dense
        index = tuple(data.draw(st.integers(0, size - 1)) for size in views[victim].shape)
        for family in (views, arrived):
            family[victim][index] = -1
        assert all(map(torch.equal, views, arrived))


def test_one_tensor_met_twice_is_one():
    tensor = torch.ones(3)
    a, b = pair([tensor, {"k": tensor}])
    assert a is b["k"]


def test_grad_is_kept():
    weight = torch.ones(3, requires_grad=True)
    value = [weight, weight * 2, weight.detach()]
    arrived = pair(value)
    assert [(t.requires_grad, t.is_leaf) for t in arrived] == [(True, True), (True, True), (False, True)]
    with torch.no_grad():
        arrived[0].fill_(5)
    assert arrived[2].tolist() == [5, 5, 5]


def test_modules_and_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3, bias=False))
    model[2].weight = torch.nn.Parameter(model[0].weight.t())
    model.tied = model[0].weight
    assert sent(model) < 400  # the transposed weight is the weight's own memory
    arrived = pair(model)
    assert arrived.tied is arrived[0].weight
    assert isinstance(arrived.tied, torch.nn.Parameter)
    assert [n for n, _ in arrived.named_parameters()] == [n for n, _ in model.named_parameters()]
    for ours, theirs in zip(model.state_dict().values(), arrived.state_dict().values(), strict=True):
        assert same(ours, theirs)
    with torch.no_grad():
        arrived[0].weight.zero_()
    assert not arrived[2].weight.any()


def test_frozen_parameter_stays_frozen():
    assert not pair(torch.nn.Parameter(torch.ones(2), requires_grad=False)).requires_grad


class Scored(torch.Tensor):
    """Subclass with an attribute."""


def test_subclasses():
    tensor = torch.arange(3.0).as_subclass(Scored)
    tensor.score = 5
    arrived = pair(tensor)
    assert type(arrived) is Scored
    assert arrived.tolist() == [0, 1, 2]
    assert arrived.score == 5


# Tensors that are more than elements


@pytest.mark.parametrize("kind", ["coo", "coo_uncoalesced", "csr", "csc", "bsr"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sparse(kind):
    dense = torch.zeros(100, 400)
    dense[::7, ::5] = torch.rand(15, 80)
    if kind == "coo":
        tensor = dense.to_sparse()
    elif kind == "coo_uncoalesced":
        tensor = torch.sparse_coo_tensor([[1, 1], [2, 2]], [3.0, 4.0], (100, 400))
    elif kind == "bsr":
        tensor = dense.to_sparse_bsr((10, 10))
    else:
        tensor = operator.methodcaller(f"to_sparse_{kind}")(dense)
    body, segments = dumps({1: tensor, 2: {0}})
    arrived = pair(tensor)
    assert arrived.layout == tensor.layout
    assert torch.equal(arrived.to_dense(), tensor.to_dense())
    assert arrived.is_sparse is tensor.is_sparse
    if arrived.is_sparse:
        assert arrived.is_coalesced() == tensor.is_coalesced()
    if kind != "coo_uncoalesced":
        assert len(body) < 1000
        assert len(segments) >= 2


def test_sparse_that_requires_grad():
    tensor = torch.eye(3).to_sparse().requires_grad_()
    arrived = pair(tensor)
    assert arrived.requires_grad
    assert torch.equal(arrived.to_dense(), torch.eye(3))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_strided_nested(grad):
    """torch.distributed.rpc kills the process with this one."""
    tensor = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], requires_grad=grad)
    arrived = pair(tensor)
    assert arrived.is_nested
    assert arrived.requires_grad == grad
    assert all(map(torch.equal, tensor.unbind(), arrived.unbind()))


@pytest.mark.slow  # torch imports much for it
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_jagged_nested():
    tensor = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=torch.jagged)
    arrived = pair(tensor)
    assert arrived.layout is torch.jagged
    assert all(map(torch.equal, tensor.unbind(), arrived.unbind()))


@pytest.mark.filterwarnings("ignore")
def test_quantized():
    tensor = torch.quantize_per_tensor(torch.rand(5000), 0.1, 3, torch.quint8)
    body, segments = dumps([tensor])
    assert len(body) < 1000
    assert sum(nbytes for _, nbytes, _ in segments) == 5000
    arrived = pair(tensor)
    assert torch.equal(arrived.int_repr(), tensor.int_repr())
    assert arrived.q_scale() == tensor.q_scale()


def test_layouts_without_a_reduction_are_refused():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no other layout")
    with pytest.raises(SerializationError, match=r"layout torch._mkldnn: send its `to_dense\(\)`"):
        dumps(torch.ones(2, 3).to_mkldnn())


def test_meta():
    arrived = pair(torch.empty(2, 3, device="meta", requires_grad=True))
    assert (arrived.device.type, arrived.shape, arrived.requires_grad) == ("meta", (2, 3), True)


def test_lazily_conjugated_and_negated():
    tensor = torch.tensor([1 + 2j, 3 - 4j], requires_grad=True)
    arrived = pair([tensor.conj(), tensor.conj().imag])
    assert arrived[0].tolist() == [1 - 2j, 3 + 4j]
    assert arrived[1].tolist() == [-2, 4]
    assert arrived[0].requires_grad


def test_types_that_only_storages_know():
    for name in ("uint4", "int2", "bits8"):
        dtype = getattr(torch, name, None)
        if dtype is not None:
            tensor = torch.empty(2000, dtype=dtype)
            arrived = pair(tensor)
            assert arrived.dtype is dtype
            assert arrived.untyped_storage().tolist() == tensor.untyped_storage().tolist()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_storages_share_with_tensors():
    tensor = torch.arange(1000.0)
    untyped, typed, view = pair([tensor.untyped_storage(), tensor.storage(), tensor[10:]])
    assert sent([tensor.untyped_storage(), tensor]) == 4000
    assert untyped.nbytes() == 4000
    view.zero_()
    assert typed[10] == 0
    assert typed[9] == 9
    assert typed.dtype is torch.float32


def test_a_storage_without_bytes():
    assert pair(torch.empty(0).untyped_storage()).nbytes() == 0


def test_bits_of_not_a_number_are_kept():
    tensor = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)
    assert bits(pair(tensor)) == bits(tensor)


# TorchScript


class Doubler(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((300,), 2.0))

    def forward(self, x):
        return self.weight * x


@torch.jit.script
def scripted_increment(x):
    return x + 1


@pytest.mark.filterwarnings("ignore")
def test_script_modules_anywhere():
    module = torch.jit.script(Doubler())
    arrived = pair([module, {"again": module}])
    assert isinstance(arrived[0], torch.jit.ScriptModule)
    assert arrived[0] is arrived[1]["again"]
    assert arrived[0](torch.ones(300)).sum() == 600


@pytest.mark.filterwarnings("ignore")
def test_bound_script_methods_are_refused():
    with pytest.raises(TypeError, match="pickle"):
        dumps(torch.jit.script(Doubler()).forward)


def test_script_functions_go_by_name():
    assert pair([scripted_increment])[0] is scripted_increment


def test_a_script_function_without_a_name_is_refused():
    def local(x: int) -> int:
        return x

    with pytest.raises(SerializationError, match="Define scripted functions at the top level"):
        dumps([torch.jit.script(local)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_other_devices_are_refused():
    with pytest.raises(RuntimeError, match="only supports CPU tensors by default"):
        dumps(torch.ones(1, device="cuda"))


SMALLER = {
    "plain": lambda: resized(torch.ones(3000), 0),
    "parameter": lambda: resized(torch.nn.Parameter(torch.ones(3000)), 0),
    "conjugated": lambda: resized(torch.ones(3000, dtype=torch.complex64).conj(), 0),
    "negated": lambda: resized(torch.ones(3000, dtype=torch.complex64).conj().imag, 0),
    "quantized": lambda: resized(torch.quantize_per_tensor(torch.ones(3000), 0.1, 0, torch.quint8), 0),
    "bits8": lambda: resized(torch.empty(3000, dtype=torch.bits8), 0),
    "values": lambda: torch.sparse_coo_tensor(torch.zeros(1, 3000).long(), resized(torch.ones(3000), 0), (1,)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", SMALLER.values(), ids=SMALLER)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_tensor_larger_than_its_storage_is_refused(make, recorded):
    tensor = make()
    if recorded and tensor.is_floating_point():
        tensor = tensor.requires_grad_()
    for value in (tensor, {"a": [tensor, tensor]}, (torch.ones(3), tensor)):
        with pytest.raises(SerializationError, match=r"its storage has 0 of \d+ bytes"):
            Serializer().dumps(value, recorded=[] if recorded else None)
    size = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0
    assert size in (0, 12), "the sender's storage stays as it is"


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("second", [slice(500), slice(0, 1000), slice(600, 900)], ids=str)
def test_segments_are_memory_of_their_owners_while_another_thread_replaces_it(second, recorded):
    for call in range(1, 80):
        tensor = torch.ones(1000)
        values = [tensor, tensor[second]] if not recorded else [tensor.requires_grad_(), torch.ones(3)]
        with Replacer(tensor, [call]) as mode:
            _, segments = Serializer().dumps(values, recorded=[] if recorded else None)
        for address, nbytes, (storage, *_) in segments:
            assert is_within(address, nbytes, storage), call
        if mode.called < call:
            return
    raise AssertionError("the last call was not reached")


def with_weight(weight):
    module = torch.nn.Linear(2, 2)
    del module.weight
    module.weight = weight
    return module


@pytest.mark.parametrize(
    "hold", [lambda t: {t}, lambda t: t.as_subclass(Scored), with_weight], ids=["set", "class", "module"]
)
def test_a_tensor_with_a_tangent_is_refused(hold):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(RuntimeError, match="its tangent would be lost"):
            dumps(hold(dual))
        dumps(hold(torch.ones(2)))
    dumps(hold(dual))


def test_zeros_without_memory():
    assert same(pair([torch._efficientzerotensor(3), torch.ones(2)]), [torch.zeros(3), torch.ones(2)])
