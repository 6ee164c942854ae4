"""The soak: its verdicts, and a minute of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.soak.ledger import NOT_SENT_AGAIN, Failure, Fault, Ledger
from bench.soak.resources import Sample, growth, in_use


def failure(error: str = "WorkerLost", begun: float = 10.0, ended: float = 11.0) -> Failure:
    return Failure("call", ("s0", "c1"), begun, ended, error, "")


@pytest.mark.parametrize(
    ("found", "explained"),
    [
        (failure(), True),
        (failure("UnknownWorker"), True),
        (failure("RpcTimeout"), False),
        (failure("RuntimeError"), False),
        (failure(begun=1.0, ended=5.0), False),
        (failure(begun=18.0, ended=18.1), False),
    ],
    ids=["loss", "unknown", "timeout", "another", "before", "after"],
)
def test_failures_that_a_fault_explains(found: Failure, explained: bool) -> None:
    assert Fault("kill", ("c1",), 10.5, 12.0).explains(found) is explained
    assert not Fault("kill", ("c2",), 10.5, 12.0).explains(found)
    assert not Fault("short stop", (), 10.5, 12.0).explains(found)


def test_a_broken_connection_explains_only_what_is_not_sent_again() -> None:
    cut = Fault("cut", ("c1",), 10.5, 12.0, says=NOT_SENT_AGAIN)
    assert not cut.explains(failure())
    assert cut.explains(failure()._replace(text=f"w1 is lost: the connection broke, so {NOT_SENT_AGAIN}."))


def test_calls_of_a_dead_worker_may_fail_until_all_have_noticed() -> None:
    late = Failure("call", ("c0", "c1"), 15.0, 15.5, "WorkerLost", "lost")
    assert not Fault("kill", ("c1",), 10.5, 12.0).explains(late)
    assert Fault("kill, new name", ("c1",), 10.5, 12.0, noticed_after=6.0).explains(late)


def test_counts_of_a_run() -> None:
    ledger = Ledger(faults=[Fault("kill", ("c1",), 10.5, 12.0), Fault("short stop", (), 10.5)])
    ledger.add(
        {"call": 3}, [failure(), failure(begun=20, ended=21), failure("RpcTimeout"), failure("ValueError", 30, 31)], []
    )
    ledger.add({"call": 1, "tensor": 2}, [], ["a tensor: 1 instead of 2"])
    figures = ledger.as_json()
    assert figures["operations"] == {"call": 4, "tensor": 2}
    assert figures["faults"] == {"kill": 1, "short stop": 1}
    assert figures["failed by a fault"] == {"kill": 1}
    assert [figures[key] for key in ("wrong", "lost", "false losses", "other failures")] == [1, 1, 1, 1]


@pytest.mark.parametrize(("per_minute", "flat"), [(0.0, True), (3.0, True), (30.0, False)])
def test_growth_after_the_warm_up(per_minute: float, flat: bool) -> None:
    warm_up = [Sample(at, 50 + at, 10, 10) for at in range(0, 180, 3)]
    samples = [Sample(at, 230 + per_minute * at / 60, 30, 12) for at in range(180, 600, 3)]
    grown = growth([*warm_up, *samples])
    assert grown["memory"].is_flat is flat
    assert grown["descriptors"].is_flat
    assert grown["heap"].is_flat
    leaking = [one._replace(heap=100 + 2 * one.at / 60) for one in samples]
    assert not growth(leaking)["heap"].is_flat
    more = [*samples[:90], *(one._replace(descriptors=60) for one in samples[90:])]
    assert not growth(more)["descriptors"].is_flat


def test_what_is_in_use_of_the_heap() -> None:
    before = in_use()
    held = [torch.ones(1 << 20) for _ in range(8)]  # 33.6 MB
    objects = [object() for _ in range(50_000)]
    during = in_use()
    assert 33 < during.heap - before.heap < 40
    assert during.objects - before.objects > 49
    del held, objects
    assert abs(in_use().heap - before.heap) < 4


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_minute_of_it(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "bench.soak", "--minutes", "1", "--seed", "11", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    figures = json.loads(out.read_text())
    assert sum(figures["operations"].values()) > 100
    assert sum(figures["faults"].values()) > 5
