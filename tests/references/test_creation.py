"""References to values that are pending, failed or unused."""

import contextlib
import threading

import pytest
import torch
from rref_helpers import (
    TIMEOUT,
    Tracked,
    fail,
    fail_when_open,
    freed,
    greet,
    make,
    make_when_open,
    own_when_open,
    ping,
    started,
)

from telegrad.errors import RpcTimeout, RRefError, SerializationError
from telegrad.rpc import Options, RRef, rpc_async
from telegrad.rpc.functions import async_execution
from telegrad.testing import Cluster, Gate, cluster, eventually, run_all

SOON = 0.05  # s; of calls that are meant to time out


def test_calls_on_a_value_under_creation_wait_without_a_thread(w: Cluster) -> None:
    gate = Gate()
    rref = w[0].remote("w1", make_when_open, ("slow", gate))
    gate.wait_for()
    calls = [rref.rpc_async().greet(str(i)) for i in range(50)]
    assert w[0].rpc_sync("w1", ping) == "pong"  # it used the same connection, so the others have arrived
    engine = w[1]._worker.engine
    eventually(lambda: engine.stats()["running_requests"] == 1, what="only the creation itself to have a thread")
    assert engine.stats()["queued_requests"] == 0
    assert not any(call.done() for call in calls)
    gate.open()
    assert [call.wait() for call in calls] == [f"slow greets {i}" for i in range(50)]
    del rref, calls
    assert freed("slow").wait(TIMEOUT)


def test_more_queued_calls_than_handler_threads() -> None:
    with cluster(2, Options(num_worker_threads=1)) as w:
        gate = Gate()
        rref = w[0].remote("w1", make_when_open, ("slow", gate))
        calls = [rref.rpc_async().greet("x") for _ in range(20)]
        gate.open()
        assert {call.wait() for call in calls} == {"slow greets x"}
        del rref, calls


def test_handed_on_while_under_creation(w: Cluster) -> None:
    """A third worker uses the reference before the value exists."""
    gate = Gate()
    rref = w[0].remote("w1", make_when_open, ("slow", gate))
    used = w[0].rpc_async("w2", greet, (rref,))
    assert w[0].rpc_sync("w2", ping) == "pong"
    assert not used.done()
    gate.open()
    assert used.wait() == "slow greets you"


def confirmed(rref: RRef[object]) -> bool:
    return rref.confirmed_by_owner()


def test_a_shared_reference_is_confirmed_before_its_value_exists(w: Cluster) -> None:
    gate = Gate()
    rref = w[0].remote("w1", make_when_open, ("slow", gate))
    assert not rref.confirmed_by_owner()
    assert w[0].rpc_sync("w2", confirmed, (rref,))
    gate.open()
    rref.to_here()
    assert rref.confirmed_by_owner()


def _length(rref: RRef[str]) -> int:
    return len(rref.to_here())


def test_the_caller_does_not_wait_for_a_chain_of_creations(w: Cluster) -> None:
    gate = Gate()
    first = w[0].remote("w1", make_when_open, ("first", gate))
    second = w[0].remote("w2", greet, (first,))
    third = w[0].remote("w1", _length, (second,))
    gate.open()
    assert third.to_here() == len("first greets you")


def test_remote_method_creates_a_new_reference(w: Cluster) -> None:
    rref = w[0].remote("w1", make, ("parent",))
    child = rref.remote().child("child")
    assert child.rpc_sync().greet("x") == "child greets x"
    del rref
    assert freed("parent").wait(TIMEOUT)
    del child
    assert freed("child").wait(TIMEOUT)


class Slow:
    """Value that is created when its gate opens."""

    def __init__(self, gate: Gate) -> None:
        gate.enter()

    def plain(self, a: int, *, b: int = 0) -> int:
        return a + b

    def add_length(self, other: RRef[str]) -> int:
        return len(other.to_here())

    @async_execution
    def later(self, x: int) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(x + 1)
        return future

    async def coroutine(self, x: int) -> int:
        return x * 3

    def again(self) -> "Slow":
        return self


@pytest.mark.parametrize("owner", ["w0", "w1"])
def test_methods_of_a_pending_value_wait_at_the_owner(w: Cluster, owner: str) -> None:
    """`remote` returns before the value exists: the gate opens afterwards."""
    gate = Gate()
    rref = w[0].remote(owner, Slow, (gate,))
    text = w[0].remote("w2", greet, (w[0].rref(Tracked("argument")),))
    proxy = rref.remote()
    results = [proxy.plain(1, b=2), proxy.later(4), proxy.coroutine(5), proxy.again().remote().plain(7)]
    results.append(proxy.add_length(text))
    unknown = proxy.nope()
    gate.wait_for()
    gate.open()
    assert [result.to_here() for result in results] == [3, 5, 15, 7, len("argument greets you")]
    with pytest.raises(AttributeError, match="type object 'Slow' has no attribute 'nope'"):
        unknown.to_here()
    rref._get_future().wait()
    with pytest.raises(AttributeError, match="type object 'Slow' has no attribute 'nope'"):
        rref.remote().nope()  # now the type can be known


@pytest.mark.parametrize("owner", ["w0", "w1"])
def test_methods_of_a_failed_value(w: Cluster, owner: str) -> None:
    gate = Gate()
    rref = w[0].remote(owner, fail_when_open, ("no such thing", gate))
    result = rref.remote().greet("x")
    gate.open()
    with pytest.raises(LookupError, match="no such thing"):
        result.to_here()


def test_method_with_its_own_timeout(w: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the value counts against the timeout, as in torch."""
    gate = Gate()
    rref = w[0].remote("w1", Slow, (gate,))
    with pytest.raises(RpcTimeout):
        rref.remote(timeout=SOON).plain(1)
    gate.open()
    rref._get_future().wait()
    times = []
    monkeypatch.setattr("telegrad.rref.rref.create", lambda *args: times.append(args[6]))
    rref.remote(timeout=TIMEOUT).plain(1)
    assert 0 < times[0] < TIMEOUT * 1e9


def test_dropped_before_it_exists(w: Cluster) -> None:
    gate = Gate()
    w[0].remote("w1", make_when_open, ("unwanted", gate))
    gate.wait_for()
    gate.open()
    assert started("unwanted").wait(TIMEOUT)
    assert freed("unwanted").wait(TIMEOUT)


@pytest.mark.parametrize("owner", ["w0", "w1"])
def test_failing_creation(w: Cluster, owner: str) -> None:
    rref = w[0].remote(owner, fail, ("no such thing",))
    uses = {
        "to_here": rref.to_here,
        "rpc_sync": lambda: rref.rpc_sync().greet("x"),
        "rpc_async": lambda: rref.rpc_async().greet("x").wait(),
        "remote": lambda: rref.remote().greet("x").to_here(),
        "elsewhere": lambda: w[0].rpc_sync("w2", greet, (rref,)),
        "again": rref.to_here,
    }
    for name, use in uses.items():
        with pytest.raises(LookupError, match="no such thing"):
            pytest.fail(f"{name} gave {use()!r}")
    assert w[0].rpc_sync("w1", ping) == "pong"


class OtherArgs(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


def fail_with_other_args() -> None:
    raise OtherArgs(1, "no")


@pytest.mark.parametrize("use", ["local_value", "to_here"])
def test_a_failed_value_is_released_although_its_error_was_raised(w: Cluster, use: str) -> None:
    def create_and_use() -> None:
        rref = w[0].remote("w0", fail_with_other_args)
        with contextlib.suppress(OtherArgs):
            getattr(rref, use)()

    create_and_use()
    eventually(lambda: not w[0]._worker.references.values)


def test_creation_with_an_argument_that_cannot_be_sent(w: Cluster) -> None:
    with pytest.raises(TypeError, match=r"cannot pickle.*at .*args"):
        w[0].remote("w1", make, (threading.Lock(),))
    assert w[0]._worker.references.stats().pending_users == 0


def test_value_that_cannot_be_sent_is_still_a_value(w: Cluster) -> None:
    rref = w[0].remote("w1", threading.Lock)
    assert rref.rpc_sync().locked() is False
    with pytest.raises(TypeError, match="cannot pickle"):
        rref.to_here()


def test_to_here_times_out_then_succeeds(w: Cluster) -> None:
    gate = Gate()
    rref = w[0].remote("w1", make_when_open, ("slow", gate))
    with pytest.raises(RpcTimeout, match="RPC ran for more than set timeout"):
        rref.to_here(timeout=SOON)
    with pytest.raises(RpcTimeout, match="RPC ran for more than"):
        rref.rpc_sync(timeout=SOON).greet("x")
    gate.open()
    assert rref.to_here() == ("slow",)
    assert rref.rpc_sync().greet("x") == "slow greets x"
    del rref
    assert freed("slow").wait(TIMEOUT)


def test_creation_that_timed_out(w: Cluster) -> None:
    gate = Gate()
    rref = w[0].remote("w1", make_when_open, ("late", gate), timeout=SOON)
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        rref._get_future().wait()
    with pytest.raises(RRefError, match=r"RRef creation via rpc.remote\(\) timed out"):
        rref.to_here()
    with pytest.raises(RRefError, match="timed out"):
        w[0].rpc_sync("w2", greet, (rref,))
    gate.wait_for()
    gate.open()
    del rref
    assert started("late").wait(TIMEOUT)
    assert freed("late").wait(TIMEOUT)


@pytest.mark.parametrize("kind", ["rpc_sync", "rpc_async"])
def test_reply_with_a_reference_after_the_timeout(w: Cluster, kind: str) -> None:
    """The caller no longer waits, so the reference in the reply is released."""
    gate = Gate()
    call = w[0].rpc_sync if kind == "rpc_sync" else lambda *a, **k: w[0].rpc_async(*a, **k).wait()
    with pytest.raises(RpcTimeout):
        call("w1", own_when_open, (kind, gate), timeout=SOON)
    gate.wait_for()
    gate.open()
    assert started(kind).wait(TIMEOUT)
    assert freed(kind).wait(TIMEOUT)


def _hold(rref: RRef[object], gate: Gate) -> str:
    gate.enter()
    return rref.owner_name()


def test_arguments_of_a_call_that_timed_out(w: Cluster) -> None:
    gate = Gate()
    rref = w[0].remote("w1", make, ("argument",))
    rref.to_here()
    with pytest.raises(RpcTimeout):
        w[0].rpc_sync("w2", _hold, (rref, gate), timeout=SOON)
    gate.wait_for()
    del rref
    assert w[0].rpc_sync("w1", ping) == "pong"
    assert not freed("argument").is_set(), "the handler on w2 still has it"
    gate.open()
    assert freed("argument").wait(TIMEOUT)


def _double(rref: RRef[torch.Tensor]) -> torch.Tensor:
    return rref.to_here() * 2


def test_a_thousand_in_flight(w: Cluster) -> None:
    rrefs = [w[0].remote(f"w{1 + i % 2}", torch.add, (torch.ones(2), i)) for i in range(1000)]
    doubled = [w[0].remote("w1", _double, (rref,)) for rref in rrefs]
    assert [int(rref.to_here()[0]) for rref in doubled] == [2 * (i + 1) for i in range(1000)]
    rrefs.clear()
    doubled.clear()
    for worker in w:
        _until_empty(w[worker.info.id])


def _until_empty(worker: object) -> None:
    references = worker._worker.references  # type: ignore[attr-defined]
    eventually(lambda: not references.values and not references.stats().users)


def test_from_many_threads_at_once(w: Cluster) -> None:
    def go(number: int) -> None:
        mine = w[number % 3]
        for i in range(20):
            rref = mine.remote(f"w{i % 3}", torch.add, (torch.ones(1), i))
            assert float(mine.rpc_sync(f"w{(i + 1) % 3}", RRef.to_here, (rref,))) == i + 1

    run_all([lambda number=number: go(number) for number in range(6)])  # type: ignore[misc]
    for worker in w:
        _until_empty(worker)


def test_used_in_callbacks(w: Cluster) -> None:
    """A callback may make calls, though it runs on a thread of the pool."""
    rref = w[0].remote("w1", make, ("called back",))
    done = rpc_async("w1", ping).then(lambda _: rref.rpc_sync().greet("x"))
    assert done.wait() == "called back greets x"


@pytest.mark.parametrize("local_id", ["5", 5.0, True, None])
def test_a_creation_names_its_reference_by_an_int(w: Cluster, local_id: object) -> None:
    with pytest.raises(SerializationError, match="does not name it"):
        w[1]._worker.handlers.accept(0, local_id, 1)


async def method_of(rref: RRef[Slow]) -> int:
    await rref
    return int(await rref.remote().plain(1, b=2))


def test_a_coroutine_creates_a_method_result_of_a_value_that_exists(w: Cluster) -> None:
    gate = Gate()
    gate.open()
    assert w[0].rpc_sync("w1", method_of, (w[0].remote("w2", Slow, (gate,)),)) == 3
