"""`telegrad.testing.faults`: what each action does, on each transport."""

import os
import pickle
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import OwnerLost, RpcTimeout, WorkerLost
from telegrad.rpc import Options, RRef
from telegrad.testing import Cluster, Gate, Local, cluster, eventually, faults, processes
from telegrad.testing.faults import Plan, Rule
from telegrad.worker.fault_rules import ACTIONS, FRAME_TYPES, KINDS

REPO = Path(__file__).resolve().parents[2]
SECRET = "a secret of the tests of faults"
LARGE = 1 << 20  # elements: over shared memory, in leased memory

on_every_transport = pytest.mark.parametrize(
    "transport", ["shm", "unix", "tcp", pytest.param("tls", marks=pytest.mark.openssl)]
)
on_streams = pytest.mark.parametrize("transport", ["unix", "tcp", pytest.param("tls", marks=pytest.mark.openssl)])


@contextmanager
def workers(transport: str, *rules: Rule, n: int = 2, seed: int = 0, **options: Any) -> Iterator[Cluster]:
    """Run workers that apply rules over one transport, without `resume` if not given."""
    options.setdefault("resume", False)
    if transport == "tls":
        options |= {"secret": SECRET}
    scheme = "tcp" if transport == "tls" else transport
    with cluster(n, Options(transports=(scheme,), faults=str(Plan(rules, seed)), **options)) as group:
        yield group


def count(seen: Local[list[int]], number: int) -> int:
    seen.value.append(number)
    return number


def large() -> torch.Tensor:
    return torch.arange(LARGE, dtype=torch.float32)


# ---- ends of connections


@on_every_transport
def test_a_dropped_request_never_arrives_and_its_caller_knows(transport: str) -> None:
    seen: Local[list[int]] = Local([])
    with workers(transport, Rule("drop", "w0", "w1", "call", nth=2)):
        assert rpc.rpc_sync("w1", count, (seen, 1)) == 1
        with pytest.raises(WorkerLost, match="fault rule 0 has dropped a message"):
            rpc.rpc_sync("w1", count, (seen, 2), timeout=0)
        assert rpc.rpc_sync("w1", count, (seen, 3)) == 3
        assert seen.value == [1, 3]
        (fault,) = faults.applied()
        assert (fault.source, fault.destination, fault.nth, fault.transport) == ("w0", "w1", 2, transport)


@on_every_transport
def test_a_dropped_reply_ends_the_call_that_waits_for_it(transport: str) -> None:
    seen: Local[list[int]] = Local([])
    with workers(transport, Rule("drop", "w1", "w0", "value")):
        with pytest.raises(WorkerLost):
            rpc.rpc_sync("w1", count, (seen, 1), timeout=0)
        assert rpc.rpc_sync("w1", count, (seen, 2)) == 2
        assert seen.value == [1, 2]


@on_every_transport
def test_both_workers_lose_a_cut_connection(transport: str) -> None:
    with workers(transport, Rule("cut", "w1", "w0", "value", nth=2)) as group:
        held = rpc.remote("w1", dict)
        assert held.to_here() == {}
        with pytest.raises(WorkerLost):
            rpc.rpc_sync("w1", abs, (-1,), timeout=0)
        for worker in group:  # the call has failed before references are notified
            eventually(lambda worker=worker: worker._worker.references.epoch_of(1 - worker.info.id) >= 1)  # type: ignore[misc]
        assert group[1]._worker.references.leaks() == []
        with pytest.raises(OwnerLost):
            held.to_here()
        assert rpc.remote("w1", dict).to_here() == {}


def test_leases_of_dropped_tensors_are_returned() -> None:
    """The shared memory of one tensor serves all of them."""
    with workers("shm", Rule("drop", "w0", "w1", "call", nth=2, count=4), shared_memory_bytes=16 << 20) as group:
        expected = large().sum()
        assert torch.equal(rpc.rpc_sync("w1", torch.sum, (large(),)), expected)
        for _ in range(4):
            with pytest.raises(WorkerLost):
                rpc.rpc_sync("w1", torch.sum, (large(),))
        for _ in range(20):
            assert torch.equal(rpc.rpc_sync("w1", torch.sum, (large(),)), expected)
        eventually(lambda: all(worker._worker.engine.stats()["live_blocks"] == 0 for worker in group))


def test_a_cut_handshake_is_tried_again() -> None:
    with workers("tcp", Rule("cut", "w0", "w1", "handshake"), Rule("drop", "w1", kind="handshake")):
        assert rpc.rpc_sync("w1", abs, (-1,)) == 1
        assert [(fault.rule.action, fault.destination) for fault in faults.applied()] == [("cut", "w1"), ("drop", "")]


# ---- sessions that outlive their connections

on_tcp = pytest.mark.parametrize("transport", ["tcp", pytest.param("tls", marks=pytest.mark.openssl)])


@on_tcp
@pytest.mark.parametrize("action", ["cut", "drop"])
def test_a_session_outlives_an_ended_connection(transport: str, action: Any) -> None:
    """Another connection carries the rest, and no call and no reference is lost."""
    seen: Local[list[int]] = Local([])
    rules = Rule(action, "w0", "w1", "call", nth=2), Rule(action, "w1", "w0", "value", nth=3)
    with workers(transport, *rules, resume=True) as group:
        held = rpc.remote("w1", dict)
        for number in range(5):
            assert rpc.rpc_sync("w1", count, (seen, number), timeout=0) == number
        assert seen.value == list(range(5))
        assert held.to_here() == {}
        assert [fault.rule.action for fault in faults.applied()] == [action, action]
        assert all(worker._worker.references.epoch_of(1 - worker.info.id) == 0 for worker in group)


# ---- delays


@on_every_transport
def test_a_delay_holds_all_messages_behind_it(transport: str) -> None:
    with workers(transport) as group:
        rpc.rpc_sync("w1", abs, (-1,))
        faults.add(Rule("delay", "w1", "w0", "value"))
        futures = [rpc.rpc_async("w1", torch.sum, (large(),)) for _ in range(3)]
        faults.wait(1)
        with group[1]:
            assert rpc.rpc_sync("w1", abs, (-2,)) == 2  # to itself: another connection
        eventually(lambda: group[1]._worker.engine.stats()["running_requests"] == 0)
        assert not any(future.done() for future in futures)
        faults.release()
        for future in futures:
            assert torch.equal(future.wait(), large().sum())


@on_every_transport
def test_a_delay_ends_after_its_time(transport: str) -> None:
    with workers(transport, Rule("delay", "w0", "w1", "call", nth=2, seconds=0.2)):
        rpc.rpc_sync("w1", abs, (-1,))
        with pytest.raises(RpcTimeout):
            rpc.rpc_sync("w1", abs, (-2,), timeout=0.1)
        assert rpc.rpc_sync("w1", abs, (-3,)) == 3


def test_a_held_connection_is_silent() -> None:
    """A delay stops heartbeats too, as a partition does."""
    with workers("tcp", Rule("delay", "w1", "w0", "value"), heartbeat=0.2):
        with pytest.raises(WorkerLost) as info:
            rpc.rpc_sync("w1", abs, (-1,), timeout=0)
        assert info.value.silent
        faults.clear()
        assert rpc.rpc_sync("w1", abs, (-2,)) == 2


# ---- order


def test_reordered_messages_of_references_change_nothing() -> None:
    """The reference protocol assumes no order (src/telegrad/protocols/README.md)."""
    with workers("shm", Rule("reorder", kind="reference", count=None), n=3) as group:
        for number in range(20):
            made = rpc.remote("w1", torch.full, ((2,), float(number)))
            forwarded = rpc.rpc_sync("w2", RRef.to_here, (made,))
            assert torch.equal(forwarded, torch.full((2,), float(number)))
        del made
        assert len(faults.applied()) > 0
        for worker in group:
            eventually(lambda worker=worker: worker._worker.references.leaks() == [])  # type: ignore[misc]


def test_duplicate_cancellations_and_pings_change_nothing() -> None:
    rules = Rule("duplicate", kind="cancel", count=None), Rule("duplicate", kind="ping", count=None)
    with workers("tcp", *rules, heartbeat=0.2):
        gate = Gate()
        waiting = rpc.rpc_async("w1", gate.enter)
        assert gate.entered.acquire(timeout=10)
        faults.wait(2)  # pings, because a call waits
        assert waiting.cancel()
        eventually(lambda: any(fault.rule.kind == "cancel" for fault in faults.applied()))
        gate.open()
        assert rpc.rpc_sync("w1", abs, (-1,)) == 1


def test_what_breaks_the_contract_of_connections_is_refused() -> None:
    with pytest.raises(ValueError, match="delivers each message once and in order, so duplicate"):
        Rule("duplicate", kind="reply")
    with pytest.raises(ValueError, match="so reorder is possible for the kinds reference and cancel only"):
        Rule("reorder", kind="call")


# ---- corruption


@on_streams
def test_a_corrupted_header_ends_the_connection(transport: str) -> None:
    seen: Local[list[int]] = Local([])
    with workers(transport, Rule("corrupt", "w0", "w1", "call", nth=2, count=3), seed=7):
        assert rpc.rpc_sync("w1", count, (seen, 1)) == 1
        for number in (2, 3, 4):
            with pytest.raises(WorkerLost):
                rpc.rpc_sync("w1", count, (seen, number), timeout=0)
        assert rpc.rpc_sync("w1", count, (seen, 5)) == 5
        assert seen.value == [1, 5]


@pytest.mark.openssl
def test_a_corrupted_body_is_rejected_by_tls() -> None:
    with workers("tls", Rule("corrupt", "w1", "w0", "value", part="body")):
        with pytest.raises(WorkerLost):
            rpc.rpc_sync("w1", torch.ones, (8,), timeout=0)
        assert torch.equal(rpc.rpc_sync("w1", torch.ones, (8,)), torch.ones(8))


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_corrupted_bodies_never_crash(transport: str) -> None:
    """Each call ends with a result, an error of its own, or a lost connection."""
    ends: set[str] = set()
    with workers(transport, Rule("corrupt", "w0", "w1", "call", count=60, part="body"), seed=11):
        for _ in range(60):
            try:
                rpc.rpc_sync("w1", max, ([1, "a", None, 2.5], torch.ones(3)), timeout=5)
                ends.add("")
            except Exception as e:
                ends.add(type(e).__name__)
        faults.clear()
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2
    assert "RpcTimeout" not in ends
    assert "CodecError" in ends


def test_corruption_needs_a_byte_stream() -> None:
    with workers("shm"), pytest.raises(ValueError, match="leave shm out of the option transports"):
        faults.add(Rule("corrupt"))


def test_calls_of_a_worker_to_itself_are_not_corrupted() -> None:
    with workers("tcp", Rule("corrupt", "*", "w0", count=None)):
        assert rpc.rpc_sync("w0", abs, (-1,)) == 1


# ---- which messages


def test_kinds_select_messages() -> None:
    rules = [Rule("delay", "w0", "w1", kind, count=None, seconds=1e-6) for kind in ("call", "backward", "context")]
    with workers("shm", *rules, Rule("delay", "w1", "w0", "error", seconds=1e-6)):
        with pytest.raises(ValueError, match="empty"):
            rpc.rpc_sync("w1", max, ([],))
        with autograd.context() as context_id:
            x = torch.ones(2, requires_grad=True)
            autograd.backward(context_id, [rpc.rpc_sync("w1", torch.mul, (x, 2)).sum()])
        eventually(lambda: any(fault.rule.kind == "context" for fault in faults.applied()))
        seen = [fault.rule.kind for fault in faults.applied()]
        assert sorted(seen) == ["backward", "call", "call", "context", "error"]


def test_the_first_rule_that_applies_does() -> None:
    with workers("shm", Rule("cut", "w0", "w1", "call", nth=3), Rule("delay", kind="call", nth=2, seconds=1e-6)):
        for _ in range(2):
            rpc.rpc_sync("w1", abs, (-1,))
        with pytest.raises(WorkerLost):
            rpc.rpc_sync("w1", abs, (-1,))
        assert [(fault.rule.action, fault.nth) for fault in faults.applied()] == [("delay", 2), ("cut", 3)]


def test_equal_seeds_give_equal_faults() -> None:
    def run(seed: int) -> list[int]:
        rule = Rule("delay", "w0", "w1", "call", count=None, probability=0.3, seconds=1e-6)
        with workers("shm", rule, seed=seed):
            for _ in range(100):
                rpc.rpc_sync("w1", abs, (-1,))
            return [fault.nth for fault in faults.applied()]

    first = run(1)
    assert first == run(1)
    assert first != run(2)
    assert 10 < len(first) < 60


def test_calls_of_a_worker_to_itself() -> None:
    with workers("shm", Rule("cut", "w0", kind="call"), Rule("cut", "w0", "w0", "call", nth=2)):
        assert rpc.rpc_sync("w0", abs, (-1,)) == 1
        with pytest.raises(WorkerLost):
            rpc.rpc_sync("w0", abs, (-2,), timeout=0)
        (fault,) = faults.applied()
        assert fault.transport == "inproc"


def test_rules_can_be_removed() -> None:
    rule = Rule("cut", "w0", "w1", "call", count=None)
    with workers("shm", rule):
        assert faults.remove(rule)
        assert not faults.remove(rule)
        assert rpc.rpc_sync("w1", abs, (-1,)) == 1


# ---- plans


def test_a_plan_survives_its_text_and_pickle() -> None:
    plan = Plan(
        [Rule("delay", "w0", kind="ping", nth=3, count=None, seconds=0.5), Rule("corrupt", part="body")], seed=5
    )
    assert Plan.parse(str(plan)) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize("text", ["{", "[]", '{"rules": [{"action": "explode"}]}', '{"rule": []}', '{"rules": [1]}'])
def test_a_wrong_plan_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="TELEGRAD_FAULTS"), cluster(1, Options(faults=text)):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "lose"}, "action has to be one of drop, delay"),
        ({"action": "cut", "kind": "packet"}, "kind has to be one of"),
        ({"action": "cut", "nth": 0}, "begin at 1"),
        ({"action": "cut", "count": 0}, "begin at 1"),
        ({"action": "cut", "nth": 1.5}, "whole numbers"),
        ({"action": "cut", "nth": 1 << 64}, "64 bits"),
        ({"action": "cut", "count": 1.5}, "whole numbers"),
        ({"action": "cut", "source": None}, "names of workers"),
        ({"action": "cut", "destination": 1}, "names of workers"),
        ({"action": "cut", "probability": 0.0}, "probability"),
        ({"action": "cut", "probability": "x"}, "probability"),
        ({"action": "cut", "seconds": 1.0}, "duration of a delay"),
        ({"action": "delay", "seconds": 0.0}, "duration of a delay"),
        ({"action": "delay", "seconds": "x"}, "duration of a delay"),
        ({"action": "delay", "seconds": float("inf")}, "less than 1e\\+09"),
        ({"action": "cut", "part": "body"}, "corrupt only"),
        ({"action": "corrupt", "source": "w0", "destination": "w0"}, "calls of a worker to itself"),
    ],
)
def test_wrong_rules_are_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rule(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rules": [{"action": "cut"}]}, "consists of rules"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_wrong_plans_are_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**arguments)


def test_the_limits_of_rules_are_those_of_the_core() -> None:
    last = Rule("delay", "w0", "w1", "call", nth=(1 << 64) - 1, count=(1 << 64) - 1, seconds=9.9e8)
    with workers("shm", last, seed=(1 << 64) - 1):
        assert rpc.rpc_sync("w1", abs, (-1,)) == 1


def test_rules_need_workers_that_apply_them() -> None:
    with cluster(1), pytest.raises(RuntimeError, match="no worker of this process applies fault rules"):
        faults.add(Rule("cut"))


may_leave = threading.Event()


def let_leave() -> None:
    may_leave.set()


def member_of_faulty_group(rank: int, n: int, init_method: str, plan: str) -> list[tuple[str, str, str]]:
    os.environ["TELEGRAD_FAULTS"] = plan
    options = Options(init_method=init_method, transports=("shm",))  # whose sessions do not outlive a cut
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=options)
    applied: list[tuple[str, str, str]] = []
    if rank == 0:
        with pytest.raises(WorkerLost):
            rpc.rpc_sync("w1", abs, (-1,), timeout=0)
        rpc.rpc_sync("w1", faults.add, (Rule("drop", "w1", "w0", "value", nth=2),))  # its reply is the first one
        with pytest.raises(WorkerLost):
            rpc.rpc_sync("w1", abs, (-1,), timeout=0)
        applied = [(fault.rule.action, fault.source, fault.destination) for fault in faults.applied()]
        rpc.rpc_sync("w1", let_leave)
    else:
        assert may_leave.wait(30)
    rpc.shutdown()
    return applied


def test_processes_get_rules_from_their_environment() -> None:
    plan = str(Plan([Rule("cut", "w0", "w1", "call")]))
    assert processes(2, member_of_faulty_group, plan, method="forkserver") == [[("cut", "w0", "w1")], []]


# ---- agreement with the core


def test_actions_and_types_are_those_of_the_core() -> None:
    message = (REPO / "csrc/core/message.h").read_text()
    types = {name: int(number) for name, number in re.findall(r"^  k(\w+) = (\d+),", message, re.MULTILINE)}
    assert {name: types[name] for name in FRAME_TYPES} == FRAME_TYPES
    handshake = re.search(r"is_handshake\(FrameType t\) \{ return t <= FrameType::k(\w+);", message)
    assert handshake
    assert KINDS["handshake"].types == tuple(range(1, types[handshake[1]] + 1))
    enum = re.search(r"enum class FaultAction[^{]*\{(.*?)\};", (REPO / "csrc/core/faults.h").read_text(), re.DOTALL)
    assert enum
    assert tuple(name.lower() for name in re.findall(r"^  k(\w+)", enum[1], re.MULTILINE)) == ACTIONS


def test_a_wait_begins_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault happens while `wait` reads what has been applied."""
    with workers("shm", Rule("drop", "w0", "w1", "call")) as group:
        found = group[0]._worker.faults
        assert found is not None
        monkeypatch.setattr(faults, "_workers", lambda: iter([found]))
        applied, counted = type(found).applied, [0]

        def late(self: Any) -> list[Any]:
            counted[0] += 1
            result = applied(self)
            if counted[0] == 1:
                with pytest.raises(WorkerLost):
                    rpc.rpc_sync("w1", abs, (1,))
            return result

        monkeypatch.setattr(type(found), "applied", late)
        faults.wait(1, timeout=20.0)
        assert counted[0] == 2
