"""Recording of tensors sent within a context, at both ends."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recording_helpers import context_at, contexts, is_received, leads_to, leaf
from torch import Tensor, nn

from telegrad import autograd, rpc
from telegrad.autograd.context import Context
from telegrad.autograd.recording import edge_of, edges_of
from telegrad.testing import Cluster
from telegrad.worker import current
from telegrad.worker.serving import handlers


@pytest.fixture
def context(four: Cluster) -> Iterator[Context]:
    """Open a context of w0."""
    with autograd.context() as context_id:
        yield contexts(four[0])[context_id]


# ---- which calls


def double(x: Tensor) -> Tensor:
    assert is_received(x)
    return x * 2


async def double_soon(x: Tensor) -> Tensor:
    await asyncio.sleep(0)
    return double(x)


@rpc.functions.async_execution
def double_later(x: Tensor) -> Any:
    future: Any = torch.futures.Future()
    y = double(x)
    threading.Thread(target=lambda: future.set_result(y)).start()
    return future


class Doubler:
    def double(self, x: Tensor) -> Tensor:
        return double(x)


def by_proxy(kind: str) -> Callable[[Tensor], Any]:
    def call(x: Tensor) -> Any:
        method = getattr(rpc.remote("w1", Doubler), kind)().double(x)
        return method if isinstance(method, Tensor) else method.wait() if kind == "rpc_async" else method.to_here()

    return call


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "rpc_sync": lambda x: rpc.rpc_sync("w1", double, (x,)),
    "keyword": lambda x: rpc.rpc_sync("w1", double, kwargs={"x": x}),
    "rpc_async": lambda x: rpc.rpc_async("w1", double, (x,)).wait(),
    "remote": lambda x: rpc.remote("w1", double, (x,)).to_here(),
    "proxy sync": by_proxy("rpc_sync"),
    "proxy async": by_proxy("rpc_async"),
    "proxy remote": by_proxy("remote"),
    "operator": lambda x: rpc.rpc_sync("w1", torch.mul, (x, 2)),
    "coroutine": lambda x: rpc.rpc_sync("w1", double_soon, (x,)),
    "async_execution": lambda x: rpc.rpc_sync("w1", double_later, (x,)),
    "by value": lambda x: rpc.rpc_sync("w1", lambda y: y * 2, (x,)),
    "to itself": lambda x: rpc.rpc_sync("w0", double, (x,)),
    "awaited": lambda x: asyncio.run(awaited(x)),
}


async def awaited(x: Tensor) -> Any:
    return await rpc.rpc_async("w1", double, (x,))


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_call_is_recorded_at_both_ends(four: Cluster, context: Context, way: str) -> None:
    x = leaf(3)
    y = WAYS[way](x)
    assert torch.equal(y, x * 2)
    assert is_received(y)
    there = context if way == "to itself" else context_at(four[1], context)
    (out,) = [sent for sent in context.sends.values() if leads_to(context, sent.id) == [x]]
    (back,) = [received for received in context.receipts.values() if received.node is y.grad_fn]
    assert there.receipts[out.id].outputs == 1
    assert len(there.sends[back.id].edges) == 1
    assert there.sends[back.id].peer == 0
    assert (out.id >> 48, back.id >> 48) == (0, 0 if there is context else 1)
    assert out.peer == back.peer == (0 if there is context else 1)


def pass_on(x: Tensor, *way: str) -> Tensor:
    return rpc.rpc_sync(way[0], pass_on, (x, *way[1:])) + x if way else x * 3


def test_nested_calls_are_recorded_on_every_worker(four: Cluster, context: Context) -> None:
    x = leaf(2)
    assert torch.allclose(pass_on(x, "w1", "w2", "w3"), x * 6)
    assert [len(context_at(worker, context).sends) for worker in four] == [1, 2, 2, 1]
    assert [len(context_at(worker, context).receipts) for worker in four] == [1, 2, 2, 1]


def test_one_message_has_one_function(context: Context) -> None:
    x, y = leaf(2), leaf(2)
    a, (b, c), d = rpc.rpc_sync("w1", tuple, ((x * 1, [y, torch.ones(2)], {"k": x}),))
    assert a.grad_fn is b.grad_fn is d["k"].grad_fn
    assert not c.requires_grad
    assert [t.output_nr for t in (a, b, d["k"])] == [0, 1, 2]
    (message,) = context.sends
    assert leads_to(context, message) == [None, y, x]


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("Python has a part in it")


@pytest.fixture
def native(four: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if Python encodes or decodes calls of w0 to w1."""
    rpc.rpc_sync("w1", int)
    monkeypatch.setattr(four[0]._worker.messages, "encode", refuse)
    monkeypatch.setattr(handlers, "SlowRequest", refuse)


@pytest.mark.usefixtures("native")
def test_calls_that_the_codec_encodes(four: Cluster, context: Context) -> None:
    x, p = leaf(3), nn.Parameter(torch.ones(3))
    assert is_received(rpc.rpc_sync("w1", double, (x,)))
    assert is_received(rpc.rpc_async("w1", double, (x,)).wait())
    assert is_received(rpc.rpc_sync("w1", torch.add, (x, p)))
    assert rpc.rpc_sync("w1", grad_mode) == (True, True)
    assert [len(context.sends), len(context.receipts)] == [3, 3]
    assert [len(context_at(four[1], context).sends), len(context_at(four[1], context).receipts)] == [3, 3]
    assert context_at(four[1], context).requests_received == {0: context.requests_sent[1]} == {0: 4}


def test_calls_that_python_encodes(four: Cluster, context: Context) -> None:
    x = leaf(3)
    rref = rpc.RRef(x)
    assert rpc.rpc_sync("w1", type_name, (rref,)) == "RRef"
    with pytest.raises(ZeroDivisionError):
        rpc.rpc_sync("w1", divide, (x,))
    back, holder = rpc.rpc_sync("w1", with_holder, (x,))
    assert is_received(back)
    assert back.grad_fn is holder.value.grad_fn
    del rref


def type_name(value: Any) -> str:
    return type(value).__name__


def divide(x: Tensor) -> float:
    return len(x) / 0


def with_holder(x: Tensor) -> Any:
    return x * 2, Holder(x * 3)


@pytest.mark.usefixtures("native")
def test_the_fast_path_into_an_ended_context(four: Cluster, context: Context) -> None:
    assert is_received(rpc.rpc_sync("w1", double, (leaf(2),)))
    there = four[1]._worker.autograd.contexts
    there.end(context_at(four[1], context))
    y = rpc.rpc_sync("w1", pass_through, (leaf(2),))
    assert y.is_leaf
    assert y.requires_grad
    assert context.id not in there.table


# ---- which tensors


def test_tensors_without_requires_grad_are_not_recorded(four: Cluster, context: Context) -> None:
    assert not rpc.rpc_sync("w1", torch.add, (torch.ones(2), 1)).requires_grad
    assert not context.sends
    assert not context.receipts
    assert not context_at(four[1], context).sends, "but it has the context, for what the handler might have sent"


def grad_mode() -> tuple[bool, bool]:
    scope = current.get()
    return torch.is_grad_enabled(), scope is not None and scope.autograd is not None


def test_without_grad_mode_nothing_is_recorded(four: Cluster, context: Context) -> None:
    with torch.no_grad():
        assert rpc.rpc_sync("w1", grad_mode) == (False, True)
        y = rpc.rpc_sync("w1", pass_through, (leaf(2),))
    assert y.is_leaf
    assert y.requires_grad
    assert not context.sends
    assert not context_at(four[1], context).sends


def pass_through(x: Any) -> Any:
    return x


def test_a_reply_decoded_without_grad_mode_is_recorded(context: Context) -> None:
    future = rpc.rpc_async("w1", double, (leaf(2),))
    with torch.no_grad():
        assert is_received(future.wait())


def test_a_bare_parameter_is_recorded_a_module_is_copied(context: Context) -> None:
    p, frozen, layer = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False), nn.Linear(2, 2)
    for value in (p, [p], {"p": (p, layer)}):
        gone = len(context.sends)
        arrived = rpc.rpc_sync("w1", kinds_in, (value,))
        assert arrived[0] == ("Tensor", False)
        assert leads_to(context, list(context.sends)[gone]) == [p]
        if len(arrived) > 1:
            assert arrived[1:] == [("Parameter", True)] * 2
    assert rpc.rpc_sync("w1", kinds_in, (frozen,)) == [("Parameter", True)]
    gone = len(context.sends)
    assert rpc.rpc_sync("w1", kinds_in, (layer,)) == [("Parameter", True)] * 2
    assert len(context.sends) == gone


class Marked(Tensor):
    mark: str


def marked(value: Marked) -> tuple[str, str, Any]:
    return type(value).__name__, value.mark, value * 2


@pytest.mark.parametrize("grad_mode", [True, False])
def test_a_tensor_subclass_is_recorded_and_kept(context: Context, grad_mode: bool) -> None:
    x = torch.ones(2).as_subclass(Marked).requires_grad_()
    for sent in (x, x * 3):
        sent.mark = "here"
        future = rpc.rpc_async("w1", marked, (sent,))
        with torch.set_grad_enabled(grad_mode):
            kind, mark, y = future.wait()
        assert (kind, mark, type(y)) == ("Marked", "here", Marked)
        assert not y.is_leaf
        autograd.backward(context.id, [y.as_subclass(Tensor).sum()])
    ((_, gradient),) = autograd.get_gradients(context.id).items()
    assert gradient.tolist() == [8, 8]


def kinds_in(value: Any) -> list[tuple[str, bool]]:
    if isinstance(value, nn.Module):
        return [(type(p).__name__, p.is_leaf) for p in value.parameters()]
    if isinstance(value, Tensor):
        return [(type(value).__name__, value.is_leaf)]
    items = value.values() if isinstance(value, dict) else value
    return [kind for item in items for kind in kinds_in(item)]


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_of_all_kinds(context: Context, pickled: bool) -> None:
    c = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    coo = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,), requires_grad=True)
    kinds = {
        "dense": leaf(3),
        "strided": leaf(4, 6)[:, ::2],
        "expanded": leaf(3, 1).expand(3, 4),
        "empty": leaf(0, 2),
        "scalar": leaf(),
        "complex": c,
        "conjugate": c.conj(),
        "imaginary": (c * 1j).imag,
        "half": torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
        "coo": coo,
        "coo result": coo * 2,
        "csr": torch.eye(3).to_sparse_csr().requires_grad_(),
    }
    for name, tensor in kinds.items():
        value = Holder(tensor) if pickled else tensor
        back = rpc.rpc_sync("w1", pass_through, (value,))
        back = back.value if pickled else back
        assert is_received(back), name
        assert back.layout is tensor.layout
        assert back.dtype is tensor.dtype
        dense = (t if t.layout is torch.strided else t.to_dense() for t in (back, tensor))
        assert torch.equal(*dense), name
        message = list(context.sends)[-1]
        edge = edges_of(context.sends[message])[0]
        assert edge is not None
        expected, _ = edge_of(tensor)
        assert (edge.node, edge.output_nr) == (expected.node, expected.output_nr), name


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_received_tensors_can_be_sent_again(context: Context) -> None:
    x = rpc.rpc_sync("w1", double, (leaf(2),))
    rpc.rpc_sync("w2", double, (x,))
    node = list(context.sends.values())[-1].edges[0]
    assert node is not None
    assert node.node is x.grad_fn


def test_the_graph_of_a_sent_tensor_is_kept_but_not_its_data(context: Context) -> None:
    x = rpc.rpc_sync("w1", double, (leaf(2),))
    big = x.view(2) * 1
    gone = weakref.ref(big.untyped_storage())
    rpc.rpc_sync("w1", double, (big,))
    rpc.rpc_sync("w1", double, (x,))
    del big, x
    gc.collect()
    assert gone() is None
    result, received = list(context.sends.values())[-2:]
    for sent in result, received:
        (edge,) = sent.edges
        assert edge is not None
        assert edge.node.next_functions, "the graph goes on"
    assert len(received.owners) == 1, "the node of a Python function does not keep its graph on its own"


def test_received_tensors_may_be_written_to(context: Context) -> None:
    for pickled in (False, True):
        x, y = leaf(3), leaf(3)
        back = rpc.rpc_sync("w1", pass_through, (Holder((x, y)) if pickled else (x, y),))
        a, b = back.value if pickled else back
        a.mul_(2)
        b[0] = 5
        assert type(a.grad_fn).__name__ == "MulBackward0"
        assert torch.equal(a, x * 2)
        assert b[0] == 5


def write(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        x.zero_()
    return x, y


def test_memory_is_shared_only_if_gradients_are_unaffected(context: Context) -> None:
    base = torch.ones(4)
    _, view = rpc.rpc_sync("w1", write, (base, base[:2]))
    assert torch.equal(view, torch.zeros(2)), "shared, as without a context"
    grown = leaf(4)
    _, view = rpc.rpc_sync("w1", write, (grown, grown[:2]))
    assert torch.equal(view, grown[:2]), "memory of its own"
    _, same = rpc.rpc_sync("w1", write, (grown, grown.detach()))
    assert torch.equal(same, grown)
    one, two = rpc.rpc_sync("w1", pass_through, ((grown, grown),))
    assert one is two


# ---- calls that were not sent


def test_calls_that_cannot_be_sent_are_not_recorded(four: Cluster, context: Context) -> None:
    before = dict(context.requests_sent)
    with pytest.raises(Exception, match="pickle"):
        rpc.rpc_sync("w1", pass_through, (leaf(2), threading.Lock()))
    with pytest.raises(Exception, match=r"Lock|pickle"):
        rpc.rpc_sync("w1", make_unsendable, (leaf(2),))
    assert len(context.sends) == 1
    assert not context_at(four[1], context).sends
    assert context.requests_sent[1] == before.get(1, 0) + 1


def make_unsendable(x: Tensor) -> Any:
    return x * 2, threading.Lock()


def test_calls_dropped_by_fault_injection_are_not_recorded(four: Cluster, context: Context) -> None:
    from telegrad.compat.rpc._testing.faults import DroppedMessage, Faults

    interceptors = four[0]._worker.calls.own_interceptors
    interceptors.add(Faults(["PYTHON_CALL"], {}, 1))
    try:
        with pytest.raises(DroppedMessage):
            rpc.rpc_sync("w1", double, (leaf(2),))
    finally:
        interceptors.clear()
    assert not context.sends
    assert not context.requests_sent


def test_outside_of_a_context_tensors_arrive_as_leaves(four: Cluster) -> None:
    assert rpc.rpc_sync("w1", kinds_in, ([leaf(2), nn.Parameter(torch.ones(1))],)) == [
        ("Tensor", True),
        ("Parameter", True),
    ]
    sparse = torch.eye(2).to_sparse().requires_grad_()
    assert rpc.rpc_sync("w1", pass_through, (sparse,)).is_leaf


def test_a_local_pass_ends_at_received_tensors(context: Context) -> None:
    y = rpc.rpc_sync("w1", double, (leaf(2),))
    with pytest.raises(RuntimeError, match="continues on another worker"):
        y.sum().backward()


def test_a_picklers_tensors_are_recorded(context: Context) -> None:
    from telegrad.rpc.api import _use_rpc_pickler
    from telegrad.rpc.internal import _InternalRPCPickler

    with _use_rpc_pickler(_InternalRPCPickler()):
        assert is_received(rpc.rpc_sync("w1", double, (leaf(2),)))


def test_internal_calls_are_not_recorded(four: Cluster, context: Context) -> None:
    four[0]._worker.start_internal(1, grad_mode, (), 5.0).wait()
    assert four[0]._worker.start_internal(1, grad_mode, (), 5.0).wait() == (True, False)
    new, known = rpc.remote("w1", Doubler), rpc.remote("w1", Doubler)
    while known.is_unknown():  # until the owner has confirmed it
        rpc.rpc_sync("w1", grad_mode)
    for rref in (new, known):
        asked = context.requests_sent[1]
        assert rref._get_type() is Doubler
        assert context.requests_sent[1] == asked
