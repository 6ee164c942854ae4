"""Log lines of workers that join, connect, die and leave."""

import gc
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from process_helpers import TIMEOUT, Actor, actors, call, failure, hang, shut_all_down

from telegrad import rpc
from telegrad.group import addresses
from telegrad.rpc import Options
from telegrad.testing import Cluster, cluster, eventually, run_all

ALL = Options(transports=("shm", "unix", "tcp"))
PROGRAM = """
import logging, sys, threading, time
import torch
from telegrad import rpc
from telegrad.worker.default_worker import current_worker

def is_busy():
    return current_worker().engine.stats()["running_requests"] > 1

rank, world_size, where, level, does = sys.argv[1:]
logging.basicConfig(level=level, format="LOG %(levelname)s %(message)s")
rpc.init_rpc(f"w{rank}", rank=int(rank), world_size=int(world_size), rpc_backend_options=rpc.Options(init_method=where))
others = [f"w{r}" for r in range(int(world_size)) if r != int(rank)]
for other in others:
    rpc.rpc_sync(other, torch.add, (torch.ones(3), 1))
if rank == "0" and does == "calls":
    begun = [rpc.rpc_async(other, time.sleep, (1,)) for other in others for _ in range(3)]
    rpc.rpc_async(others[0], time.sleep, (1,))
    made = [rpc.remote(other, time.sleep, (1,)) for other in others]
if rank == "0" and does == "is served":
    serves = rpc.rpc_async("w1", time.sleep, (60,), timeout=0)  # outlasts the end
    while not rpc.rpc_sync("w1", is_busy):
        pass
print("ready", flush=True)
if rank == "0" and does == "fetches":
    rpc.remote("w1", time.sleep, (1,)).to_here(timeout=0)
if does == "polls":
    while True:
        rpc.rpc_sync(others[0], torch.add, (torch.ones(3), 1))
if rank == "0" or does == "waits":
    while True:
        time.sleep(1)  # without an end, the interrupt might be noticed by another thread alone
rpc.shutdown()
"""


@contextmanager
def programs(count: int, level: str, does: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Run programs with workers that have called each other."""
    where = f"tcp://127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(count), where, level, does],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        for program in started:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n", program.communicate()[1]
        yield started
    finally:
        for program in started:
            program.kill()
            program.communicate()


STEPS = [
    "calls",
    "shuts down",
    *(pytest.param(does, marks=pytest.mark.slow) for does in ("waits", "fetches", "polls", "is served")),
]


@pytest.mark.parametrize("does", STEPS)
def test_interrupted_programs_print_their_own_traceback_at_most(does: str) -> None:
    """Ctrl+C at a terminal interrupts all programs."""
    with programs(2, "WARNING", does) as started:
        for program in started:
            program.send_signal(signal.SIGINT)
        log_lines = [program.communicate(timeout=TIMEOUT)[1] for program in started]
    for text in log_lines:
        assert "LOG" not in text, text
        assert text.count("Traceback") <= 1, text
        end = text.rstrip().rpartition("\n")[2]
        if end == "lost sys.stderr":  # CPython's report of an interrupt while it prints a traceback
            end = re.sub(r".*object type name: (\w+)\n.*", r"\1", text, flags=re.DOTALL)
        assert re.fullmatch(r"(KeyboardInterrupt|(telegrad\.errors\.)?WorkerLost(: .*: it shut down\..*)?)?", end), text


def test_an_interrupt_at_exit_ends_the_wait_for_handlers_silently() -> None:
    program = (
        "import os, signal, threading, time\n"
        "from telegrad import rpc\n"
        "from telegrad.worker import default_worker\n"
        "def interrupt():\n"
        "    while not worker.closed: time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "rpc.init_rpc('alone', rank=0, world_size=1)\n"
        "worker = default_worker.current_worker()\n"
        "call = rpc.rpc_async('alone', time.sleep, (1,))\n"
        "assert rpc.rpc_sync('alone', abs, (-1,)) == 1\n"
        "threading.Thread(target=interrupt, daemon=True).start()\n"
    )
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert done.stderr == ""


def test_peers_of_an_interrupted_program_log_one_line() -> None:
    with programs(3, "INFO", "waits") as started:
        started[1].send_signal(signal.SIGINT)
        for program, name in ((started[0], "w0"), (started[2], "w2")):
            assert program.stderr is not None
            line = ""
            while "gone" not in line:
                line = program.stderr.readline()
            assert line == f"LOG INFO worker w1 is gone from the group of {name}: it shut down\n"
            program.send_signal(signal.SIGINT)
        for program in (started[0], started[2]):
            assert "w1" not in program.communicate(timeout=TIMEOUT)[1]


# ---- a death


def begin_unread_calls(to: str, count: int) -> None:
    """Start calls without reading their results."""
    for _ in range(count):
        rpc.rpc_async(to, hang, timeout=0)
    rpc.rpc_sync(to, abs, (-1,), timeout=TIMEOUT)


def collect_garbage() -> None:
    gc.collect()


def test_a_death_is_one_line_on_each_worker_that_sees_it(tmp_path: Path) -> None:
    """Neither pending nor later calls add lines."""
    with actors(4, tmp_path) as four:
        rest = four[:3]
        for actor in rest:
            actor.do(begin_unread_calls, "w3", 3)
        four[3].end()
        for actor in rest:
            eventually(lambda actor=actor: "w3 is lost" in actor.stderr(), TIMEOUT)  # type: ignore[misc]
            for _ in range(3):
                assert actor.do(failure, call, "w3", abs, -1)[0] == "WorkerLost"
            actor.do(collect_garbage)
        shut_all_down(rest)
        for actor in rest:
            assert actor.leave() == 0
            (line,) = actor.stderr().splitlines()
            assert line.startswith(f"worker w3 is lost to {actor.name}: the connection was closed without a goodbye")


def see_the_loss_of(name: str) -> None:
    eventually(lambda: failure(call, name, abs, -1)[0] == "WorkerLost", TIMEOUT)


def test_a_death_seen_by_others_is_one_line_as_well(tmp_path: Path) -> None:
    """Without a connection to it, w1 is notified at shutdown."""
    with actors(3, tmp_path) as three:
        three[0].do(call, "w2", abs, -1)
        three[2].end()
        three[0].do(see_the_loss_of, "w2")
        rest: list[Actor] = three[:2]
        shut_all_down(rest)
        for actor in rest:
            assert actor.leave() == 0
            (line,) = actor.stderr().splitlines()
            assert line.startswith(f"worker w2 is lost to {actor.name}: ")


# ---- an ordinary run


def log_lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "telegrad" and r.levelno >= level]


def both_ways(w: Cluster) -> None:
    assert w[0].rpc_sync("w1", abs, (-1,)) == 1
    assert w[1].rpc_sync("w0", abs, (-1,)) == 1


def test_an_ordinary_run_logs_at_info_at_most(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "telegrad")
    with cluster(2, ALL) as w:
        both_ways(w)
        eventually(lambda: len(log_lines(caplog)) == 4, what="two lines of each worker")
        lines = log_lines(caplog)
        for me, other in ((0, 1), (1, 0)):
            tcp = next(a for a in w[me]._worker.member.addresses if a.startswith("tcp:"))
            assert f"worker w{me} joined as rank {me} of 2; it listens on shm, unix, {tcp}" in lines
            assert f"worker w{me} is connected to w{other} over shm" in lines
    lines = log_lines(caplog)[4:]
    assert {"worker w0 left its group", "worker w1 left its group"} <= set(lines)
    gone = {line for line in lines if "is gone" in line}
    assert gone <= {f"worker w{a} is gone from the group of w{b}: it shut down" for a, b in ((0, 1), (1, 0))}
    assert len(lines) == 2 + len(gone)
    assert log_lines(caplog, logging.WARNING) == []


def test_members_of_a_dynamic_group_join_and_leave(caplog: pytest.LogCaptureFixture) -> None:
    from torch.distributed import HashStore

    caplog.set_level(logging.INFO, "telegrad")
    store = HashStore()
    first = rpc.Worker("first", store=store)
    second = rpc.Worker("second", store=store)
    assert first.rpc_sync("second", abs, (-1,)) == 1
    second.shutdown()
    eventually(lambda: any("is gone" in line for line in log_lines(caplog)))
    first.shutdown()
    lines = [line.partition(";")[0] for line in log_lines(caplog)]
    assert "worker first joined as rank 0 of a dynamic group with 0 others" in lines
    assert "worker second joined as rank 1 of a dynamic group with 1 others" in lines
    assert "worker second is gone from the group of first: it left the group" in lines
    assert lines[-1] == "worker first left its group"
    assert log_lines(caplog, logging.WARNING) == []


# ---- the transport


def pair(options: list[Options]) -> list[Any]:
    from torch.distributed import HashStore

    store = HashStore()
    return run_all([lambda r=r: rpc.Worker(f"w{r}", r, 2, options[r], store=store) for r in range(2)])  # type: ignore[misc]


def lines_of_a_pair(caplog: pytest.LogCaptureFixture, options: list[Options]) -> dict[str, str]:
    """Return what two workers log about the connection of a call."""
    caplog.set_level(logging.INFO, "telegrad")
    workers = pair(options)
    try:
        assert workers[0].rpc_sync("w1", abs, (-1,)) == 1
        eventually(lambda: len([line for line in log_lines(caplog) if "is connected" in line]) == 2)
    finally:
        run_all([worker.shutdown for worker in workers])
    return {line.split()[1]: line for line in log_lines(caplog) if "is connected" in line}


def test_the_reason_why_no_faster_transport_is_used_peer_without_it(caplog: pytest.LogCaptureFixture) -> None:
    lines = lines_of_a_pair(caplog, [ALL, Options(transports=("tcp",))])
    assert re.fullmatch(
        r"worker w0 is connected to w1 over tcp, to 127\.0\.0\.1:\d+"
        r" \(not shm or unix: w1 does not listen there, by its option transports\)",
        lines["w0"],
    )
    assert lines["w1"] == "worker w1 is connected to w0 over tcp, from 127.0.0.1"


def test_the_reason_why_no_faster_transport_is_used_other_host(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = iter(["this/1", "that/1"])
    monkeypatch.setattr(addresses, "host_key", lambda: next(hosts))
    lines = lines_of_a_pair(caplog, [ALL, ALL])
    for me, other in (("w0", "w1"), ("w1", "w0")):
        assert lines[me].endswith(f" (not shm or unix: {other} is on another host, or in another network namespace)"), (
            lines[me]
        )
        assert " over tcp, " in lines[me]


def test_program_without_logging_prints_nothing_in_an_ordinary_run() -> None:
    program = (
        "from telegrad import rpc\n"
        "rpc.init_rpc('alone', rank=0, world_size=1)\n"
        "assert rpc.rpc_sync('alone', abs, (-1,)) == 1\n"
        "rpc.shutdown()\n"
    )
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True)
    assert done.stderr == ""
