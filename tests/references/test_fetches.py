"""Creations and fetches of codec-encodable values: the fast path."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rref_helpers import TIMEOUT, fail, fail_when_open, freed, make, make_when_open, ping, started
from torch.utils._python_dispatch import TorchDispatchMode

from telegrad.errors import OwnerLost
from telegrad.protocols.rref import RRefId
from telegrad.rpc import RRef, rpc_async
from telegrad.rpc.functions import async_execution
from telegrad.rref.creation import PendingCreation
from telegrad.testing import Cluster, Gate, eventually
from telegrad.wire import Flag, Status, Tag


@pytest.fixture
def slow(w: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that Python has encoded."""
    encoded: list[Any] = []
    encode = w[0]._worker.messages.encode

    def note(*args: Any, **named: Any) -> Any:
        if len(args) > 2:  # else a reply, or a message of the reference protocol
            encoded.append(args)
        return encode(*args, **named)

    monkeypatch.setattr(w[0]._worker.messages, "encode", note)
    return encoded


def double(x: Any) -> Any:
    return x * 2


def both(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


class Odd:
    """Travels by pickle."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    __hash__ = None  # type: ignore[assignment]


async def coroutine(x: int) -> int:
    return x + 1


@async_execution
def later(x: int) -> Any:
    return rpc_async("w0", double, (x,))


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "value", "native"),
    [
        (double, (21,), {}, 42, True),
        (both, (1, "a"), {"b": [2.5, None]}, ((1, "a"), {"b": [2.5, None]}), True),
        (coroutine, (1,), {}, 2, True),
        (later, (4,), {}, 8, True),
        (both, (Odd(),), {}, ((Odd(),), {}), False),
        (lambda x: x, (3,), {}, 3, False),
    ],
    ids=["int", "keywords", "coroutine", "async_execution", "pickled argument", "lambda"],
)
def test_values(w: Cluster, slow: list[Any], function: Any, args: Any, kwargs: Any, value: Any, native: bool) -> None:
    rref = w[0].remote("w1", function, args, kwargs)
    assert rref.to_here() == value
    assert rref.confirmed_by_owner()
    assert (not slow) is native


def test_made_once_fetched_often_and_freed(w: Cluster) -> None:
    rref = w[0].remote("w1", make, ("short",))
    assert [rref.to_here() for _ in range(3)] == [("short",)] * 3
    del rref
    assert freed("short").wait(TIMEOUT)


def test_fetches_wait_without_a_thread(w: Cluster) -> None:
    gate = Gate()
    rref = w[0].remote("w1", make_when_open, ("awaited", gate))
    plain = w[0].remote("w1", both, (1,))
    got: list[Any] = []
    threads = [threading.Thread(target=lambda: got.append(rref.to_here())) for _ in range(20)]
    for thread in threads:
        thread.start()
    gate.wait_for()
    owned = w[1]._worker.references.values[rref.id]
    eventually(lambda: len(owned._waiters or ()) == 20, what="all fetches to wait for the value")
    assert w[1]._worker.engine.stats()["running_requests"] == 1
    assert plain.to_here() == ((1,), {})
    gate.open()
    for thread in threads:
        thread.join()
    assert got == [("awaited",)] * 20


def test_failures_are_raised_where_the_value_is_fetched(w: Cluster) -> None:
    rref = w[0].remote("w1", fail, ("plain",))
    for _ in range(2):
        with pytest.raises(LookupError, match="plain"):
            rref.to_here()
    gate = Gate()
    rref = w[0].remote("w1", fail_when_open, ("slowly", gate))
    threading.Thread(target=lambda: (gate.wait_for(), gate.open())).start()
    with pytest.raises(LookupError, match="slowly"):
        rref.to_here()
    with pytest.raises(LookupError, match="slowly"):
        rref._get_future().wait() or rref.to_here()


def counted_but_not_sent(w: Cluster) -> tuple[Any, Callable[[], None]]:
    """Return a reference to 8 on w1, and a function that sends its creation."""
    references, client = w[0]._worker.references, w[0]._worker.calls.client
    creation = PendingCreation(w[0]._worker, (1, double, 0))
    rref = references.begin_create(1, references.new_id(), creation)
    handle: Any = RRef.of(w[0]._worker, rref, 1)
    handle._creation = creation
    return handle, lambda: client.create(1, double, (4,), {}, 0, rref.local_id, creation)


def test_a_fetch_that_overtakes_its_creation_waits_for_it(w: Cluster) -> None:
    """Two threads of the owner may take them up in either order."""
    handle, create = counted_but_not_sent(w)
    fetched = w[0]._worker.calls.client.start(1, None, (), {}, 0, handle)
    assert w[0].rpc_sync("w1", ping) == "pong"
    eventually(lambda: w[1]._worker.references.stats().expected == 1, what="the owner to expect the creation")
    assert not fetched.done()
    create()
    assert fetched.wait() == 8
    eventually(lambda: w[1]._worker.references.stats().handles == 0)


def test_a_creation_by_a_method_that_overtakes_its_receiver_waits_for_it(w: Cluster) -> None:
    """The request introduces the receiver to the owner."""
    handle, create = counted_but_not_sent(w)
    result = handle.remote().bit_length()
    assert w[0].rpc_sync("w1", ping) == "pong"
    eventually(lambda: w[1]._worker.references.stats().expected == 1, what="the owner to expect the receiver")
    assert not result._creation.done()
    create()
    assert result.to_here() == 4


def test_a_fetch_of_what_was_never_created(w: Cluster) -> None:
    me = w[0]._worker.references
    made_up = RRef.of(w[0]._worker, RRefId(0, me.new_id()), 1)
    with pytest.raises(OwnerLost, match="worker w1: it is from a connection that has ended"):
        w[0]._worker.calls.client.call(1, None, (), {}, 0, made_up)
    eventually(lambda: w[1]._worker.references.stats().expected == 0)


@pytest.mark.parametrize("body", [b"\xff", ((1,), {}), "twice"], ids=["garbage", "too little", "an id in use"])
def test_creations_that_make_no_sense_are_answered(w: Cluster, body: Any) -> None:
    me, owner = w[0]._worker, w[1]._worker
    number, text = me.calls.names.find(double)
    if body == "twice":
        rref = w[0].remote("w1", double, (1,))
        assert rref.to_here() == 2
        body = ((1,), {}, rref.id.local_id)
        owner.references.values[rref.id].ready = False  # the owner takes a ready one for a lost creator's
    coded = body if type(body) is bytes else me.messages.encode(1, body).body
    flags, timeout = int(Flag.KEEP_AS), int(TIMEOUT * 1e9)
    completion: Any = me.engine.call(1, int(Tag.CALL), flags, number, text, coded, None, timeout, False, None)
    assert completion[0] == Status.REPLIED
    assert completion[1] == Tag.ERROR
    assert w[0].rpc_sync("w1", ping) == "pong"


class NoMemory(TorchDispatchMode):
    """Within, no tensor can be copied."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.clone.default:
            raise MemoryError("no memory for a copy")
        return function(*args, **(kwargs or {}))


def test_an_argument_that_cannot_be_coded_leaves_nothing_pending(w: Cluster, slow: list[Any]) -> None:
    holes = torch.zeros(100, 1000)[:, 0]  # which are not sent: it is copied first
    rref = w[0].remote("w1", both, (holes,))
    assert torch.equal(rref.to_here()[0][0], holes)
    assert not slow
    with NoMemory(), pytest.raises(MemoryError):
        w[0].remote("w1", both, (holes,))
    eventually(lambda: w[0]._worker.references.pending_creations == 0)


def test_callbacks_of_a_creation_run_in_the_pool(w: Cluster) -> None:
    """A caller that decodes the completion of another call must not run user code."""
    for _ in range(20):
        gate = Gate()
        rref = w[0].remote("w1", make_when_open, ("called back", gate))
        ran: list[str] = []
        done = threading.Event()
        future = rref._get_future()
        future.add_done_callback(lambda _, ran=ran: ran.append(threading.current_thread().name))
        future.add_done_callback(lambda _, done=done: done.set())
        gate.open()
        assert rref.to_here() == ("called back",)
        assert w[0].rpc_sync("w1", ping) == "pong"
        assert done.wait(TIMEOUT)
        assert ran[0].startswith("telegrad-w0-")
        assert future.value() is None
    assert started("called back").is_set()


def test_one_future_for_all_fetches(w: Cluster) -> None:
    rref = w[0].remote("w1", double, (1,))
    futures = {id(rref._get_future()) for _ in range(3)}
    assert rref._get_future().wait() is None
    assert rref.to_here() == 2
    assert {id(rref._get_future())} == futures
    late = w[0].remote("w1", double, (1,))
    assert late.to_here() == 2
    eventually(lambda: late._creation is not None and late._creation.done())
    assert late._get_future().done()
    assert late._get_future().value() is None


def test_unused_creations_complete(w: Cluster) -> None:
    references = w[0]._worker.references
    rrefs = [w[0].remote("w1", double, (i,)) for i in range(200)]
    eventually(lambda: references.pending_creations == 0)
    assert [rref.to_here() for rref in rrefs] == [2 * i for i in range(200)]
    del rrefs
    eventually(lambda: w[1]._worker.references.stats().owners == 0)
