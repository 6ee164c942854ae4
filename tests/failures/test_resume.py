"""TCP connections that break between two live workers whose sessions go on."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from process_helpers import actors, call, state
from proxy_helpers import Proxy, proxied

from telegrad import autograd, optim, rpc
from telegrad.errors import OwnerLost, WorkerLost
from telegrad.rpc import Options
from telegrad.testing import Cluster, eventually

TIMEOUT = 20.0
HEARTBEAT = 2.0

executed: Counter[str] = Counter()


def count(name: str, *values: object) -> str:
    executed[name] += 1
    return name


@pytest.fixture
def options() -> Options:
    executed.clear()
    return Options(transports=("tcp",), heartbeat=HEARTBEAT, rpc_timeout=TIMEOUT)


def break_often(proxy: Proxy, times: int, calls: list[int]) -> None:
    """Reset the connections when some more calls have been made."""
    for _ in range(times):
        before = len(calls)
        eventually(lambda before=before: len(calls) >= before + 10)  # type: ignore[misc]
        proxy.reset()


def test_resets_in_the_middle_of_many_calls(w: Cluster, proxy: Proxy) -> None:
    """Each function runs once, and each result arrives."""
    stop = threading.Event()
    calls: list[int] = []
    wrong: list[object] = []

    def run(source: int, thread: int) -> None:
        n = 0
        while not stop.is_set():
            name = f"{source}.{thread}.{n}"
            try:
                got = w[source].rpc_sync(f"w{1 - source}", count, (name, torch.ones(n % 5 * 1000)))
            except Exception as e:
                got = e
            if got != name:
                wrong.append(got)
            calls.append(n)
            n += 1

    threads = [threading.Thread(target=run, args=(source, thread)) for source in (0, 1) for thread in (0, 1)]
    for thread in threads:
        thread.start()
    break_often(proxy, 20, calls)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert set(executed.values()) == {1}
    assert len(executed) == len(calls)
    assert proxy.accepted >= 20


def double(x: torch.Tensor) -> torch.Tensor:
    executed[str(int(x[0]))] += 1
    return x * 2


@pytest.mark.parametrize("which", [0, 1, -1])
def test_one_of_several_connections_breaks(which: int, w: Cluster, proxy: Proxy) -> None:
    """Large messages are striped over connections, of which one breaks meanwhile."""
    n = 4 << 20
    calls = 0
    for _ in range(3):
        while proxy.routes < 4:  # connections are added after large messages
            calls += 1
            assert w[0].rpc_sync("w1", double, (torch.full((n,), float(calls)),))[-1] == 2 * calls
            assert calls < 100
        numbers = range(calls + 1, calls + 7)
        calls += len(numbers)
        futures = [w[i % 2].rpc_async(f"w{1 - i % 2}", double, (torch.full((n,), float(i)),)) for i in numbers]
        small = [w[i % 2].rpc_async(f"w{1 - i % 2}", count, (f"small {i}",)) for i in numbers]
        accepted = proxy.accepted
        proxy.reset_one(which)
        for i, future in zip(numbers, futures, strict=True):
            assert torch.equal(future.wait(), torch.full((n,), 2.0 * i))
        assert [future.wait() for future in small] == [f"small {i}" for i in numbers]
        eventually(lambda before=accepted: proxy.accepted > before)  # type: ignore[misc]
    assert set(executed.values()) == {1}


def test_asynchronous_calls_in_flight(w: Cluster, proxy: Proxy) -> None:
    for round_ in range(10):
        futures = [w[0].rpc_async("w1", count, (f"{round_}.{i}",)) for i in range(50)]
        proxy.reset()
        assert [future.wait() for future in futures] == [f"{round_}.{i}" for i in range(50)]
    assert set(executed.values()) == {1}


def hold(rref: "rpc.RRef[list[int]]") -> None:
    state["rref"] = rref


def append(number: int) -> list[int]:
    value: list[int] = state["rref"].to_here()
    return [*value, number]


def test_references_survive(w: Cluster, proxy: Proxy) -> None:
    """Both directions: a reference to a remote value, and one that the peer holds."""
    held = w[0].remote("w1", list, ((1, 2),))
    assert held.to_here() == [1, 2]
    with w[0]:
        own: rpc.RRef[list[int]] = rpc.RRef([3])
    w[0].rpc_sync("w1", hold, (own,))
    for n in range(5):
        proxy.reset()
        assert held.to_here() == [1, 2]
        assert w[0].rpc_sync("w1", append, (n,)) == [3, n]
        proxy.reset()
        made = w[0].remote("w1", list, ((n,),))
        proxy.reset()
        assert made.to_here() == [n]
        del made
    state.clear()
    del held, own
    for worker in (w[0], w[1]):
        eventually(lambda worker=worker: worker._worker.references.stats().owners == 0)  # type: ignore[misc]


def numbers(n: int) -> Iterator[int]:
    yield from range(n)


def test_streams_survive(w: Cluster, proxy: Proxy) -> None:
    got = []
    with w[0]:
        for number in rpc.stream("w1", numbers, args=(200,)):
            got.append(number)
            if number % 40 == 7:
                proxy.reset()
    assert got == list(range(200))


def scale(x: torch.Tensor, weight: "rpc.RRef[torch.Tensor]") -> torch.Tensor:
    return x * weight.local_value()


def parameter() -> torch.Tensor:
    return torch.full((3,), 2.0, requires_grad=True)


def test_backward_and_optimizer_steps_survive(w: Cluster, proxy: Proxy) -> None:
    with w[0]:
        weight = rpc.remote("w1", parameter)
        optimizer = optim.DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
        for _ in range(4):
            with autograd.context() as context_id:
                x = torch.ones(3, requires_grad=True)
                loss = rpc.rpc_sync("w1", scale, args=(x, weight)).sum()
                proxy.reset()
                autograd.backward(context_id, [loss])
                proxy.reset()
                optimizer.step(context_id)
        assert torch.equal(weight.to_here().detach(), torch.full((3,), 0.0))


def test_a_second_of_dead_network(w: Cluster, proxy: Proxy) -> None:
    held = w[0].remote("w1", list, ((1,),))
    held.to_here()
    proxy.frozen = True
    futures = [w[0].rpc_async("w1", count, (str(i),)) for i in range(20)]
    threading.Timer(1.0, lambda: setattr(proxy, "frozen", False)).start()
    assert [future.wait() for future in futures] == [str(i) for i in range(20)]
    assert held.to_here() == [1]
    proxy.open = False
    proxy.reset()
    threading.Timer(1.0, lambda: setattr(proxy, "open", True)).start()
    assert w[1].rpc_sync("w0", count, ("back",)) == "back"
    assert held.to_here() == [1]
    assert set(executed.values()) == {1}


def test_a_peer_that_stays_out_of_reach_is_lost(options: Options) -> None:
    """Every waiter at both ends is notified, within the limit of the failure detector."""
    options.heartbeat = 0.4
    with proxied(options, graceful=False) as (group, proxy):
        held = group[0].remote("w1", list)
        held.to_here()
        proxy.open = False
        start = time.monotonic()
        proxy.reset()
        waiting = [
            group[0].rpc_async("w1", count, ("x",), timeout=0),
            group[1].rpc_async("w0", count, ("y",), timeout=0),
        ]
        for future in waiting:
            with pytest.raises(WorkerLost, match="could not be reached again"):
                future.wait()
        assert time.monotonic() - start < 3 * options.heartbeat + 2.0
        proxy.open = True
        with pytest.raises(OwnerLost):
            held.to_here()


@pytest.mark.parametrize("size", [1 << 18, 1 << 22])
def test_large_tensors_run_once_or_fail_with_a_reason(w: Cluster, proxy: Proxy, size: int) -> None:
    good = 0
    for n in range(10):
        x = torch.full((size // 4,), float(n))
        timer = threading.Timer(0.001 * n, proxy.reset)
        timer.start()
        try:
            assert torch.equal(w[0].rpc_sync("w1", torch.clone, (x,)), x)
            good += 1
        except WorkerLost as error:
            assert "retry=" in error.why  # noqa: PT017
        timer.join()
        assert w[0].rpc_sync("w1", abs, (-n,)) == n
    assert good > 0


def test_a_retry_makes_up_for_a_large_tensor(w: Cluster, proxy: Proxy) -> None:
    x = torch.ones(1 << 20)
    for n in range(5):
        timer = threading.Timer(0.001 * n, proxy.reset)
        timer.start()
        got = w[0].rpc_sync("w1", torch.clone, (x,), retry=rpc.Retry(attempts=10, backoff=0.001))
        assert torch.equal(got, x)
        timer.join()


def test_encrypted_connections(options: Options) -> None:
    options.secret = "a secret of the group"
    executed.clear()
    with proxied(options) as (group, proxy):
        x = torch.rand(1 << 20)
        for n in range(5):
            assert torch.equal(group[0].rpc_sync("w1", torch.clone, (x,)), x)
            futures = [group[0].rpc_async("w1", count, (f"{n}.{i}",)) for i in range(20)]
            proxy.reset()
            assert [future.wait() for future in futures] == [f"{n}.{i}" for i in range(20)]
        assert set(executed.values()) == {1}
        assert group[0]._worker.members.lost == {}


def begin_to_wait(to: str) -> None:
    state["future"] = rpc.rpc_async(to, time.sleep, (TIMEOUT,), timeout=0)


def until_lost() -> float:
    with pytest.raises(WorkerLost):
        state["future"].wait()
    return time.time()


@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_process_is_lost_at_once(tmp_path: Path, dead: int) -> None:
    """The kernel says that it is gone, at either end of the session."""
    with actors(2, tmp_path, transports=("tcp",), heartbeat=60.0, rpc_timeout=0) as group:
        assert group[0].do(call, "w1", abs, -1) == 1
        other = group[1 - dead]
        other.do(begin_to_wait, f"w{dead}")
        end = other.begin(until_lost)
        start = time.time()
        assert group[dead].process.pid is not None
        os.kill(group[dead].process.pid, signal.SIGKILL)
        assert end.result() - start < 1.0
