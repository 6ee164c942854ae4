"""Tensors of every kind survive the round trip and belong to the receiver."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.testing import Cluster, Gate, assert_quiescent, cluster

pytestmark = [
    pytest.mark.usefixtures("clean", "quiet"),
    pytest.mark.filterwarnings(
        "error",
        "ignore:.*(prototype stage|beta state|ComplexHalf|quantized tensor creation)",  # torch's, of the tensors here
    ),
]

Make = Callable[[], torch.Tensor]


def echo(*x: Any) -> Any:
    return x if len(x) != 1 else x[0]


def facts(x: torch.Tensor) -> dict[str, Any]:
    """Describe a tensor as the callee received it."""
    return {
        "dtype": x.dtype,
        "shape": tuple(x.shape),
        "requires_grad": x.requires_grad,
        "leaf": x.is_leaf,
        "layout": x.layout,
        "strides": x.stride() if x.layout is torch.strided and not x.is_nested else None,
        "type": type(x),
        "name": rpc.get_worker_info().name,
    }


DENSE: dict[str, Make] = {
    "float": lambda: torch.arange(6.0).reshape(2, 3),
    "scalar": lambda: torch.tensor(3.5),
    "no elements": lambda: torch.zeros(0),
    "no rows": lambda: torch.zeros(0, 3),
    "no columns": lambda: torch.zeros(3, 0, 2),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "every second": lambda: torch.arange(10.0)[::2],
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "offset": lambda: torch.arange(10)[3:7],
    "channels last": lambda: torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "column of a large one": lambda: torch.arange(1_000_000.0).reshape(1000, 1000)[:, 3],
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j]).conj().imag,
    "large": lambda: torch.arange(300_000),
    "requires grad": lambda: torch.ones(2, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "buffer": lambda: torch.nn.Buffer(torch.ones(2)),
}
for dtype in (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32),
):
    DENSE[str(dtype)] = lambda dtype=dtype: torch.tensor([0.0, 1.0, 1.0]).to(dtype)  # type: ignore[misc]


@pytest.mark.parametrize("name", DENSE)
def test_dense(name: str) -> None:
    sent = DENSE[name]()
    for arguments in ((sent,), (sent, "and more", {1, 2})):  # by the codec and by pickle
        got = rpc.rpc_sync("w1", echo, arguments)
        got = got if len(arguments) == 1 else got[0]
        assert type(got) is type(sent)
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        assert got.requires_grad == sent.requires_grad
        assert got.is_leaf
        assert torch.equal(as_bytes(got), as_bytes(sent))


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes; some element types have no comparison."""
    return (
        x.detach()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
    )


@pytest.mark.parametrize("name", ["transposed", "every second", "expanded", "channels last"])
def test_strides_are_kept(name: str) -> None:
    sent = DENSE[name]()
    assert rpc.rpc_sync("w1", facts, (sent,))["strides"] == sent.stride()
    assert rpc.rpc_sync("w1", echo, (sent,)).stride() == sent.stride()


def test_requires_grad_is_kept() -> None:
    for sent in (torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 2):
        there = rpc.rpc_sync("w1", facts, (sent,))
        assert there["requires_grad"]
        assert there["leaf"]


class Tagged(torch.Tensor):
    pass


OTHERS: dict[str, Make] = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "coo, not coalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), check_invariants=True),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.qint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        torch.ones(2, 2), torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.qint8
    ),
    "nested, strided": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "nested, jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "subclass": lambda: torch.ones(3).as_subclass(Tagged),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds(name: str) -> None:
    """Tensors arrive or raise; a strided nested one ends a process of torch's RPC."""
    sent = OTHERS[name]()
    try:
        got = rpc.rpc_sync("w1", echo, (sent,))
    except RuntimeError as e:
        pytest.fail(f"{name}: {e}")
    assert type(got) is type(sent)
    assert got.layout == sent.layout
    assert got.dtype == sent.dtype
    if sent.is_nested:
        pairs = zip(got.unbind(), sent.unbind(), strict=True)
    elif sent.layout is torch.strided and not sent.is_quantized:
        pairs = iter([(got, sent)]) if not sent.is_meta else iter([(got.shape, sent.shape)])  # type: ignore[list-item]
    elif sent.is_quantized:
        pairs = iter([(got.dequantize(), sent.dequantize())])
    else:
        pairs = iter([(got.to_dense(), sent.to_dense())])
    for a, b in pairs:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert rpc.rpc_sync("w1", len, ((1,),)) == 1


def test_views_share_memory_at_the_callee() -> None:
    base = torch.zeros(4)
    got_base, got_view = rpc.rpc_sync("w1", echo, (base, base[1:3]))
    got_view += 1
    assert got_base.tolist() == [0, 1, 1, 0]
    same, again = rpc.rpc_sync("w1", echo, (base, base))
    assert same.data_ptr() == again.data_ptr()
    assert base.sum() == 0


def test_a_small_view_is_sent_without_its_base() -> None:
    large = torch.zeros(10_000_000)
    got = rpc.rpc_sync("w1", storage_size, (large[:4],))
    assert got <= 1024


def storage_size(x: torch.Tensor) -> int:
    return x.untyped_storage().nbytes()


def test_received_tensors_are_writable_and_aligned() -> None:
    for size in (1, 7, 1000, 100_000):
        got = rpc.rpc_sync("w1", echo, (torch.arange(size),))
        got += 1
        assert got[0] == 1
    large = rpc.rpc_sync("w1", echo, (torch.zeros(100_000),))
    assert large.data_ptr() % 64 == 0


@pytest.mark.parametrize("size", [3, 300_000])
def test_a_received_tensor_keeps_its_storage(size: int) -> None:
    with cluster(2):
        x = rpc.rpc_sync("w1", echo, (torch.ones(size),))
    assert x.resize_(2).sum() == 2
    assert x.resize_(size).sum() == size
    with pytest.raises(RuntimeError, match="not resizable"):
        x.resize_(size + 1)
    assert x.clone().resize_(size + 1)[:size].sum() == size


def test_a_received_tensor_can_be_trained_and_saved(tmp_path: Any) -> None:
    x = rpc.rpc_sync("w1", echo, (torch.ones(3),)).requires_grad_(True)
    (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]
    torch.save(x, tmp_path / "x")
    assert torch.equal(torch.load(tmp_path / "x"), x)


def test_tensors_outlive_their_worker() -> None:
    kept = []
    with cluster(2, check=False) as group:
        for size in (1, 1000, 1_000_000):
            kept.append(group[0].rpc_sync("w1", torch.arange, (size,)))
        received = group[1].rref(None)
        del received
    for tensor in kept:
        tensor += 1
        assert tensor[-1] == tensor.numel()


gate = Gate()


def enter_and_echo(x: Any) -> Any:
    gate.enter()
    return x


@pytest.mark.parametrize("size", [10, 20_000, 4_000_000])
def test_a_tensor_may_be_changed_once_the_call_is_sent(size: int) -> None:
    tensor = torch.zeros(size)
    futures = []
    for number in range(3):
        tensor.fill_(number)
        futures.append(rpc.rpc_async("w1", echo, (tensor,)))
    tensor.fill_(-1)
    for number, future in enumerate(futures):
        got = future.wait()
        assert got[0] == got[-1] == number


@pytest.mark.parametrize("size", [10, 20_000, 4_000_000])
def test_a_tensor_may_be_changed_once_the_first_call_is_sent(size: int) -> None:
    """The first call to a worker precedes the connection."""
    with cluster(3) as fresh:
        tensor = torch.ones(size)
        future = fresh[0].rpc_async("w1", echo, (tensor,))
        rref = fresh[0].remote("w2", echo, (tensor,))
        tensor.zero_()
        assert future.wait().sum() == rref.to_here().sum() == size
        del rref


@pytest.mark.parametrize("size", [10, 20_000, 4_000_000])
def test_the_tensors_of_a_reply_may_be_changed_afterwards(size: int) -> None:
    """The reply no longer uses the handler's memory when the caller has it."""
    owner = rpc.remote("w1", torch.zeros, (size,))
    first = owner.to_here()
    owner.rpc_sync().fill_(5)
    assert first.sum() == 0
    assert owner.to_here()[-1] == 5


def test_many_tensors() -> None:
    tensors = [torch.full((2,), float(i)) for i in range(3000)]
    got = rpc.rpc_sync("w1", echo, (tensors,))
    assert [t[0].item() for t in got] == list(range(3000))
    mixed = [torch.full((size,), float(size)) for size in range(0, 40_000, 1000)]
    got = rpc.rpc_sync("w1", echo, (mixed, {"more": {"set"}}))[0]
    assert all(torch.equal(a, b) for a, b in zip(got, mixed, strict=True))


def test_a_big_tensor() -> None:
    sent = torch.arange(16 << 20, dtype=torch.int32)  # 64 MiB
    got = rpc.rpc_sync("w1", echo, (sent,))
    assert torch.equal(got, sent)


def test_big_tensors_in_both_directions_at_once(two: Cluster) -> None:
    def exchange(rank: int) -> None:
        sent = torch.full((2 << 20,), float(rank))
        for future in [rpc.rpc_async(1 - rank, echo, (sent,)) for _ in range(4)]:
            assert torch.equal(future.wait(), sent)

    two.on_each(exchange)


def test_buffers_are_released_with_their_tensors(two: Cluster) -> None:
    got = rpc.rpc_sync("w1", echo, (torch.zeros(100_000),))
    part = got[5:6]
    del got
    assert two[0]._worker.engine.stats()["live_blocks"] == 1
    assert part.sum() == 0
    del part
    assert_quiescent(two[0])
    assert_quiescent(two[1])


def test_storages_are_sent() -> None:
    tensor = torch.arange(4.0)
    storage, back = rpc.rpc_sync("w1", echo, (tensor.untyped_storage(), tensor))
    assert storage.data_ptr() == back.untyped_storage().data_ptr()
