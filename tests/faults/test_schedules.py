"""Mixed work under seeded faults: each operation is right or raises a loss."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import Cancelled, OwnerLost, RRefDeleted, WorkerLost
from telegrad.rpc import Options, RRef
from telegrad.testing import Local, cluster, eventually, faults
from telegrad.testing.faults import Plan, Rule

OPERATIONS = 150
TOMBSTONES = "ended, but not for all"
LIMIT = 20.0  # s for one operation; what takes longer hangs
CHANCES = (
    Rule("cut", count=None, probability=0.01),
    Rule("drop", count=None, probability=0.01),
    Rule("delay", count=None, probability=0.03, seconds=0.002),
    Rule("reorder", kind="reference", count=None, probability=0.3),
    Rule("cut", kind="handshake", count=None, probability=0.02),
)
REPEATED = (
    Rule("duplicate", kind="cancel", count=None, probability=0.5),
    Rule("duplicate", kind="ping", count=None, probability=0.5),
    Rule("reorder", kind="cancel", count=None, probability=0.5),
    Rule("reorder", kind="reference", count=None, probability=0.3),
)
CORRUPT_HEADERS = (
    *REPEATED,
    Rule("corrupt", count=None, probability=0.01),
    Rule("corrupt", kind="handshake", count=None, probability=0.02),
)
CORRUPT_RECORDS = (*CORRUPT_HEADERS, Rule("corrupt", count=None, probability=0.01, part="body"))  # of TLS


def call(a: str, b: str, n: int) -> None:
    assert rpc.rpc_sync(a, divmod, (n, 7), timeout=LIMIT) == divmod(n, 7)


def nested(a: str, b: str, n: int) -> None:
    assert rpc.rpc_sync(a, ask, (b, n), timeout=LIMIT) == -n


def ask(to: str, n: int) -> int:
    return int(rpc.rpc_sync(to, int.__neg__, (n,)))


def tensor(a: str, b: str, n: int) -> None:
    x = torch.arange(n * 100, dtype=torch.float32)
    assert torch.equal(rpc.rpc_sync(a, torch.mul, (x, 2), timeout=LIMIT), x * 2)


def reference(a: str, b: str, n: int) -> None:
    made = rpc.remote(a, list, (range(n),), timeout=LIMIT)
    assert rpc.rpc_sync(b, fetch, (made,), timeout=LIMIT) == list(range(n))
    assert made.rpc_sync().__len__() == n


def fetch(held: RRef[list[int]]) -> list[int]:
    return held.to_here()


def gradients(a: str, b: str, n: int) -> None:
    with autograd.context() as context_id:
        x = torch.full((3,), float(n), requires_grad=True)
        y = rpc.rpc_sync(a, times_through, (x, b), timeout=LIMIT)
        autograd.backward(context_id, [(y * x).sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], 12 * x.detach())


def times_through(x: torch.Tensor, to: str) -> torch.Tensor:
    return rpc.rpc_sync(to, torch.mul, (x * 2, 3))  # type: ignore[no-any-return]


WORK: list[Callable[[str, str, int], None]] = [call, nested, tensor, reference, gradients]
sequence = Counter[str]()  # numbers of the calls of `once`
runs = Local(Counter[int]())


def once(a: str, b: str, n: int) -> None:
    """Check that a call runs once if it has a result, and at most once if not."""
    sequence["once"] += 1
    number = sequence["once"]
    assert rpc.rpc_sync(a, note, (runs, number), timeout=LIMIT) == number
    assert runs.value[number] == 1


def note(seen: Local[Counter[int]], number: int) -> int:
    seen.value[number] += 1
    return number


def canceled(a: str, b: str, n: int) -> None:
    """Cancel some of the calls; the others have their results."""
    futures = [rpc.rpc_async(a, divmod, (n + i, 7), timeout=LIMIT) for i in range(4)]
    for future in futures[::2]:
        future.cancel()
    for i, future in enumerate(futures):
        try:
            assert future.wait() == divmod(n + i, 7)
        except Cancelled:
            assert i % 2 == 0


DAMAGED_WORK = [*WORK, once, canceled, canceled]


def run(
    seed: int,
    transport: str,
    *,
    resume: bool = True,
    chances: tuple[Rule, ...] = CHANCES,
    works: list[Callable[[str, str, int], None]] = WORK,
) -> int:
    """Run one schedule; return the number of losses."""
    choose = random.Random(seed)
    plan = Plan(chances, seed)
    losses = 0
    secure = {"secret": "a secret of the tests of schedules"} if transport == "tls" else {}
    scheme = "tcp" if transport == "tls" else transport
    options = Options(faults=str(plan), transports=(scheme,), rpc_timeout=LIMIT, resume=resume, **secure)
    with cluster(3, options) as group:
        for _ in range(OPERATIONS):
            work = choose.choice(works)
            caller, a, b = choose.randrange(3), choose.randrange(3), choose.randrange(3)
            number = choose.randrange(1, 50)
            try:
                with group[caller]:
                    work(f"w{a}", f"w{b}", number)
            except (WorkerLost, OwnerLost, RRefDeleted):  # deleted: with the session of the worker that had it
                losses += 1
        applied = {fault.rule.action for fault in faults.applied()}
        assert applied
        if works is DAMAGED_WORK:
            assert applied <= {"corrupt", "duplicate", "reorder"}
            assert len(applied) > 1, "a few messages of some schedules are not of the kind of one rule"
            assert not [number for number, count in runs.value.items() if count > 1], "a call ran twice"
        faults.clear()
        for caller in range(3):
            for to in range(3):
                with group[caller]:
                    eventually(lambda to=to: reached(f"w{to}"))  # type: ignore[misc]
        for worker in group:
            eventually(lambda worker=worker: not worker._worker.references.leaks(), what=f"{worker.info.name}")  # type: ignore[misc]
            eventually(lambda worker=worker: not graphs_of(worker), what="graphs to go")  # type: ignore[misc]
    return losses


def graphs_of(worker: rpc.Worker) -> dict[str, int]:
    """Return the counts of contexts and passes, without tombstones."""
    return {name: count for name, count in worker._worker.autograd.left().items() if count and TOMBSTONES not in name}


def reached(name: str) -> bool:
    try:
        return bool(rpc.rpc_sync(name, abs, (-1,), timeout=LIMIT) == 1)
    except WorkerLost:
        return False


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_few_schedules(transport: str) -> None:
    assert run(1, transport, resume=False) > 0


def test_a_few_schedules_of_sessions_that_outlive_connections() -> None:
    assert run(1, "tcp") == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_many_schedules(transport: str) -> None:
    assert all(run(seed, transport, resume=False) > 0 for seed in range(2, 32))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_schedules_of_sessions_that_outlive_connections() -> None:
    assert all(run(seed, "tcp") == 0 for seed in range(2, 32))


# ---- messages that are corrupt, doubled or out of order


def damage(seed: int, transport: str) -> int:
    """Run one schedule in which a wrong value, or a call that runs twice, is an error."""
    chances = CORRUPT_RECORDS if transport == "tls" else CORRUPT_HEADERS
    return run(seed, transport, resume=False, chances=chances, works=DAMAGED_WORK)


on_streams = pytest.mark.parametrize("transport", ["unix", "tcp", pytest.param("tls", marks=pytest.mark.openssl)])


@on_streams
def test_a_few_schedules_with_damaged_messages(transport: str) -> None:
    assert damage(1, transport) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@on_streams
def test_many_schedules_with_damaged_messages(transport: str) -> None:
    assert all(damage(seed, transport) > 0 for seed in range(2, 32))
