"""Attempts of a run, without a launcher."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from telegrad import rpc
from telegrad.errors import TelegradError
from telegrad.group.attempts import Attempts, Superseded
from telegrad.protocols.leases import Timing
from telegrad.rpc import Options, Worker
from telegrad.testing import run_all

TIMING = Timing(2.0)

TIMEOUT = Options(rpc_timeout=30)


@pytest.fixture
def store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]


@pytest.fixture
def of_run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the environment variables that an agent sets."""

    def become(run: str | None, count: int = 0, agents: int = 1) -> None:
        if run is None:
            monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
            return
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        monkeypatch.setenv("GROUP_WORLD_SIZE", str(agents))

    return become


def join(store: Any, rank: int, size: int, options: Options = TIMEOUT) -> Worker:
    return Worker(f"w{rank}", rank, size, options, store=store)


def join_all(store: Any, ranks: range, size: int) -> list[Worker]:
    return run_all([lambda rank=rank: join(store, rank, size) for rank in ranks])  # type: ignore[misc]


def end(workers: list[Worker]) -> None:
    for worker in workers:
        worker.shutdown(graceful=False)


@pytest.mark.parametrize("agents", [1, 2])
def test_attempts_are_separate_while_older_ones_run(store: Any, of_run: Callable[..., None], agents: int) -> None:
    companies = []
    for count in range(3):
        of_run("job", count if agents == 1 else 0, agents)  # several agents may count nothing at all
        companies.append(join_all(store, range(2), 2))
    for company in companies:
        with company[0]:
            assert rpc.rpc_sync("w1", abs, (-1,)) == 1
        end(company)


@pytest.mark.parametrize("agents", [1, 2])
def test_an_incomplete_attempt(store: Any, of_run: Callable[..., None], agents: int) -> None:
    """Rank 0 had announced it and rank 1 had joined; both have ended."""
    of_run("job", 0, agents)
    before = Attempts(store, "w0", 0, 1.0, TIMING).part()
    before.set("rank/1", "w1 of before")
    of_run("job", 1, agents)
    company = join_all(store, range(2), 2)
    end(company)


def test_a_worker_that_tried_the_attempt_before_moves_on(store: Any, of_run: Callable[..., None]) -> None:
    """Only the next announcement shows that another agent's attempt has ended."""
    of_run("job", 0, 2)
    before = Attempts(store, "w0", 0, 1.0, TIMING).part()
    joined: list[Worker] = []
    early = threading.Thread(target=lambda: joined.append(join(store, 1, 2)))
    early.start()
    before.wait(["member/1"])
    joined.append(join(store, 0, 2))
    early.join(30)
    assert sorted(worker.info.name for worker in joined) == ["w0", "w1"]
    end(joined)


def test_rank_0_of_a_replaced_attempt_gives_up(store: Any, of_run: Callable[..., None]) -> None:
    of_run("job", 0)
    late = Attempts(store, "w0", 0, 1.0, TIMING)
    late.part()
    of_run("job", 1)
    Attempts(store, "w0", 0, 1.0, TIMING).part()
    with pytest.raises(
        Superseded, match=r"w0 \(rank 0\) belongs to an attempt of the run that a later one has replaced"
    ):
        late.check()
    with pytest.raises(Superseded, match=r"belongs to attempt 0 of the run, but attempt 1 has begun"):
        late.part()


class _Overtaken:
    """Store in which another worker acts right after the first check of a key."""

    def __init__(self, store: Any, meanwhile: Callable[[], object]) -> None:
        self._store = store
        self._meanwhile = [meanwhile]

    def check(self, keys: list[str]) -> bool:
        found: bool = self._store.check(keys)
        while not found and self._meanwhile:
            self._meanwhile.pop()()
        return found

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        while self._meanwhile:
            self._meanwhile.pop()()
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("announced", [False, True])
def test_an_announcement_does_not_replace_a_later_one(store: Any, of_run: Callable[..., None], announced: bool) -> None:
    def begin_next() -> None:
        of_run("job", 1)
        later.append(Attempts(store, "w0", 0, 1.0, TIMING))
        later[0].part()

    later: list[Attempts] = []
    of_run("job", 0)
    if announced:
        Attempts(store, "w0", 0, 1.0, TIMING).part()
    with pytest.raises(Superseded, match="belongs to attempt 0 of the run, but attempt 1 has begun"):
        Attempts(_Overtaken(store, begin_next), "w0", 0, 1.0, TIMING).part()
    later[0].check()


def test_runs_at_one_store(store: Any, of_run: Callable[..., None]) -> None:
    of_run("one")
    first = join_all(store, range(2), 2)
    of_run("other")
    second = join_all(store, range(2), 2)
    end(first + second)


def test_rank_1_without_an_agent(store: Any, of_run: Callable[..., None]) -> None:
    of_run(None)
    outside = Attempts(store, "w1", 1, 30.0, TIMING)
    assert outside.part() is store
    outside.check()
    of_run("job")
    Attempts(store, "w0", 0, 30.0, TIMING).part().set("written", "by rank 0")
    with pytest.raises(Superseded) as moved:
        outside.check()
    assert outside.another(moved.value)
    assert outside.part().get("written") == b"by rank 0"


@pytest.mark.parametrize("first", [0, 1])
def test_rank_0_without_an_agent(store: Any, of_run: Callable[..., None], first: int) -> None:
    of_run(None)
    rank_0 = Attempts(store, "w0", 0, 30.0, TIMING)
    of_run("job")
    rank_1 = Attempts(store, "w1", 1, 30.0, TIMING)

    def begin() -> Any:
        part = rank_0.part()
        part.set("rank/0", "w0")
        return part

    steps = [begin, rank_1.part]
    parts = [step() for step in steps] if first == 0 else run_all(steps[::-1])
    assert parts == [store, store]


def test_missing_rank_0(store: Any, of_run: Callable[..., None]) -> None:
    of_run("job")
    with pytest.raises(
        TelegradError, match=r"worker w1 \(rank 1\) waited 0.1 s for the worker with rank 0 of the run job"
    ):
        join(store, 1, 2, Options(rpc_timeout=0.1))


def test_a_rank_used_twice(store: Any, of_run: Callable[..., None]) -> None:
    of_run("job")
    company = join_all(store, range(2), 2)
    with pytest.raises(TelegradError, match=r"waited 0\.1 s for the worker with rank 0"):
        join(store, 1, 2, Options(rpc_timeout=0.1))
    end(company)
