"""Silent workers are lost; slow and busy ones are not."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from process_helpers import Actor, actors, call_many, failure, hang, shut_all_down, state

from telegrad import autograd, optim, rpc
from telegrad.errors import WorkerLost
from telegrad.rpc import Options, RRef
from telegrad.testing import Gate, cluster, eventually
from telegrad.worker.membership import service as membership_service

INTERVAL = 0.6  # s
LIMIT = 3 * INTERVAL
SLACK = 2.0  # s, on a busy machine


@pytest.fixture(params=["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def four(request: Any, tmp_path: Path) -> Iterator[list[Actor]]:
    options = {"transports": (request.param,), "heartbeat": INTERVAL, "local_heartbeat": INTERVAL, "rpc_timeout": 0}
    with actors(4, tmp_path, handshake_timeout=INTERVAL, connect_timeout=INTERVAL, **options) as group:
        yield group


# ---- steps


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(2, 2)


def parameters_of(layer: torch.nn.Linear) -> list[RRef[torch.Tensor]]:
    return [RRef(parameter) for parameter in layer.parameters()]


def prepare(owner: str, holder: str) -> None:
    """Make references, a context and an optimizer that need the owner."""
    layer = rpc.remote(owner, linear)
    parameters = layer.rpc_sync().parameters
    assert parameters is not None
    state["layer"] = layer
    state["optimizer"] = optim.DistributedOptimizer(torch.optim.SGD, rpc.rpc_sync(owner, _parameters, (layer,)), lr=0.1)
    rpc.rpc_sync(holder, keep, (layer,))


def _parameters(layer: RRef[torch.nn.Linear]) -> list[RRef[torch.Tensor]]:
    return parameters_of(layer.local_value())


def keep(value: object) -> None:
    state["kept"] = value


def call_without_deadline(to: str) -> None:
    rpc.rpc_sync(to, hang, timeout=0)


def fetch_forever(to: str) -> None:
    rpc.remote(to, hang).to_here(timeout=0)


class Blocking(torch.autograd.Function):
    """Identity whose backward does not end."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        threading.Event().wait()
        return gradient


def blocking(x: torch.Tensor) -> torch.Tensor:
    return Blocking.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def backward_forever(to: str) -> None:
    with autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        loss = rpc.rpc_sync(to, blocking, (x,), timeout=0).sum()
        state["passing"] = True
        autograd.backward(context_id, [loss])


def step_of_optimizer() -> None:
    with autograd.context() as context_id:
        state["optimizer"].step(context_id)


def leave_without_a_timeout() -> None:
    rpc.shutdown()


def incarnation_lost(to: str) -> tuple[int, int, bool]:
    """Return the incarnation of the worker, and that of the error of a call to it."""
    worker = rpc.api._get_current_rpc_agent().worker
    member = worker.members.get(worker.members.resolve(to).id)
    assert member is not None
    with pytest.raises(WorkerLost) as info:
        rpc.rpc_sync(to, hang, timeout=0)
    return member.incarnation, info.value.incarnation, info.value.silent


WAITS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "call": (call_without_deadline, ("w3",)),
    "value": (fetch_forever, ("w3",)),
    "backward": (backward_forever, ("w3",)),
}


def is_passing() -> bool:
    return bool(state.get("passing"))


def test_everything_that_waits_for_a_stopped_process_ends(four: list[Actor]) -> None:
    first, second, third, silent = four
    first.do(prepare, "w3", "w1")
    waits = {name: first.begin(failure, function, *args) for name, (function, args) in WAITS.items()}
    lost = second.begin(incarnation_lost, "w3")
    eventually(lambda: first.do(is_passing))
    begun = silent.stop()
    for name, step in waits.items():
        kind, text = step.result()
        assert kind in ("WorkerLost", "OwnerLost"), (name, kind, text)
        assert "no sign of life" in text, name
    known, seen, is_silent = lost.result()
    assert known == seen > 0
    assert is_silent
    assert time.monotonic() - begun < LIMIT + SLACK
    kind, text = first.do(failure, step_of_optimizer)
    assert kind in ("WorkerLost", "OwnerLost"), text
    eventually(lambda: second.do(failure, fetch_kept)[0] == "OwnerLost")
    assert first.do(call_many, "w1", 10) == third.do(call_many, "w0", 10) == 10


def fetch_kept() -> None:
    state["kept"].to_here()


def test_a_graceful_shutdown_does_not_wait_for_a_silent_member(four: list[Actor]) -> None:
    first, second, third, silent = four
    for actor in (first, second, third):
        actor.do(call_many, "w3", 2)
    begun = silent.stop()
    leaving = [actor.begin(leave_without_a_timeout) for actor in (first, second, third)]
    for step in leaving:
        step.result()
    assert time.monotonic() - begun < LIMIT + SLACK
    assert any("w3" in actor.stderr() for actor in (first, second, third)), "it is named"


# ---- slow is not dead


def hold_the_gil(seconds: float) -> None:
    ctypes.PyDLL("libc.so.6").usleep(int(seconds * 1e6))


def test_a_worker_that_holds_the_gil_is_not_lost(four: list[Actor]) -> None:
    first, busy = four[:2]
    first.do(call_many, "w1", 2)
    first.begin(failure, call_without_deadline, "w1")
    busy.do(hold_the_gil, 1.5 * LIMIT)
    assert first.do(call_many, "w1", 2) == 2
    assert "lost" not in first.stderr() + busy.stderr()


def count_there(to: str, size: int) -> int:
    """Send ones, a tensor of `size` bytes, and return their number at the callee."""
    return int(rpc.rpc_sync(to, torch.count_nonzero, (torch.ones(size, dtype=torch.uint8),), timeout=0))


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_two_gigabytes_to_a_worker_that_holds_the_gil_for_a_minute(tmp_path: Path, transport: str) -> None:
    """With the default options nobody is lost, in any direction."""
    with actors(3, tmp_path, transports=(transport,)) as (first, busy, third):
        for actor in (first, third):
            assert actor.do(call_many, "w1", 2) == 2
        holding = busy.begin(hold_the_gil, 60.0)
        counts = [actor.begin(count_there, "w1", 2 << 30) for actor in (first, third)]
        holding.result(90.0)
        assert [step.result(90.0) for step in counts] == [2 << 30] * 2
        assert busy.do(call_many, "w0", 2) == first.do(call_many, "w2", 2) == 2
        assert "lost" not in "".join(actor.stderr() for actor in (first, busy, third))


def see_other_hosts() -> None:
    """Let members count as processes of other hosts, whose ends no kernel reports."""
    membership_service.fate_of = lambda *_, **__: "unknown"  # type: ignore[assignment]


def members() -> list[str]:
    return sorted(info.name for info in rpc.api._get_current_rpc_agent().worker.members.infos())


def test_a_member_that_holds_the_gil_longer_than_its_lease_is_not_lost(tmp_path: Path) -> None:
    """The core answers meanwhile, so the member loses no other one either."""
    with actors(2, tmp_path, transports=("tcp",), heartbeat=INTERVAL, member_lease=1.0) as (first, busy):
        for actor in (first, busy):
            actor.do(see_other_hosts)
        busy.do(hold_the_gil, 4.0)
        assert first.do(members) == ["w0", "w1"]
        assert first.do(call_many, "w1", 2) == busy.do(call_many, "w0", 2) == 2
        assert "lost" not in first.stderr() + busy.stderr()


@pytest.mark.parametrize("connected", [False, True], ids=["not connected", "connected"])
def test_a_silent_member_of_another_host_is_lost(tmp_path: Path, connected: bool) -> None:
    with actors(2, tmp_path, transports=("tcp",), heartbeat=INTERVAL, member_lease=1.0) as (first, silent):
        first.do(see_other_hosts)
        if connected:
            assert first.do(call_many, "w1", 2) == 2
        begun = silent.stop()
        eventually(lambda: "w1" in first.do(lost_members), timeout=1.0 + 2 * LIMIT + SLACK)
        assert time.monotonic() - begun >= 1.0


def lost_members() -> list[str]:
    return sorted(rpc.api._get_current_rpc_agent().worker.members.lost_names())


def test_a_worker_with_busy_threads_is_not_lost() -> None:
    """Its handlers have all threads, and nothing is sent."""
    gate = Gate()
    options = Options(num_worker_threads=2, heartbeat=0.2, local_heartbeat=0.2, transports=("tcp",))
    with cluster(2, options) as group:
        pending = [group[0].rpc_async("w1", gate.enter) for _ in range(4)]
        received = group[0]._worker.engine.stats()["received_messages"]
        eventually(lambda: group[0]._worker.engine.stats()["received_messages"] >= received + 10)
        gate.open()
        rpc.wait_all(pending)
        assert group[0]._worker.members.lost == {}


# ---- without heartbeats, a stopped process may resume


@pytest.fixture(params=["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def unwatched(request: Any, tmp_path: Path) -> Iterator[list[Actor]]:
    with actors(3, tmp_path, transports=(request.param,), local_heartbeat=0, heartbeat=0, rpc_timeout=0) as group:
        yield group


def append(number: int) -> int:
    state.setdefault("numbers", []).append(number)
    return -number


def numbers() -> list[int]:
    return list(state["numbers"])


def begin_to_append(to: str, count: int) -> None:
    state["appending"] = [rpc.rpc_async(to, append, (number,), timeout=0) for number in range(count)]


def appended() -> list[int]:
    return rpc.wait_all(state.pop("appending"))


def test_calls_to_a_stopped_process_run_once_when_it_resumes(unwatched: list[Actor]) -> None:
    first, stopped, other = unwatched
    assert first.do(call_many, "w1", 1) == 1
    stopped.stop()
    first.do(begin_to_append, "w1", 50)
    waiting = first.begin(appended)
    assert first.do(call_many, "w2", 10) == other.do(call_many, "w0", 10) == 10
    assert not waiting.is_over
    stopped.resume()
    assert waiting.result() == [-number for number in range(50)]
    assert sorted(stopped.do(numbers)) == list(range(50))
    shut_all_down(unwatched)
    assert [actor.leave() for actor in unwatched] == [0] * 3


def call_with_deadline(to: str, seconds: float) -> int:
    return int(rpc.rpc_sync(to, abs, (-5,), timeout=seconds))


def test_a_deadline_ends_a_call_to_a_stopped_process(unwatched: list[Actor]) -> None:
    first, stopped, _ = unwatched
    assert first.do(call_many, "w1", 1) == 1
    begun = stopped.stop()
    assert first.do(failure, call_with_deadline, "w1", 0.3)[0] == "RpcTimeout"
    assert 0.3 <= time.monotonic() - begun < 0.3 + SLACK
    stopped.resume()
    assert first.do(call_with_deadline, "w1", 0) == 5
    shut_all_down(unwatched)


def test_a_shutdown_with_a_limit_names_a_stopped_process(unwatched: list[Actor]) -> None:
    """Then the processes of the others end without an error."""
    first, second, stopped = unwatched
    assert first.do(call_many, "w2", 1) == second.do(call_many, "w2", 1) == 1
    begun = stopped.stop()
    leaving = [actor.begin(failure, rpc.shutdown, True, 1.0) for actor in (first, second)]
    for step in leaving:
        kind, text = step.result()
        assert (kind, "still missing: w2" in text) == ("ShutdownTimeout", True), text
    assert time.monotonic() - begun < 1.0 + SLACK
    assert first.leave() == second.leave() == 0
