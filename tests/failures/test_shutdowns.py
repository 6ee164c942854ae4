"""Shutdowns with missing workers or at unusual moments."""

import asyncio
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from telegrad import rpc
from telegrad.errors import NotInitialized, ShutdownTimeout, WorkerLost
from telegrad.rpc import Options
from telegrad.testing import Cluster, Gate, cluster, eventually, run_all
from telegrad.timeouts import SharedDeadline
from telegrad.worker.scope import current

SOON = 0.2  # s; of shutdowns that are meant to give up


def test_graceful_shutdown_names_the_missing_worker() -> None:
    with cluster(4, graceful=False) as w:

        def end(rank: int) -> None:
            with pytest.raises(ShutdownTimeout, match=r"gave up after 1 s; still missing: w1, w3\. .* never") as e:
                w[rank].shutdown(timeout=1)  # time enough for both to come, on a busy machine too
            assert e.value.missing == ("w1", "w3")

        run_all([lambda: end(0), lambda: end(2)])
        with pytest.raises(NotInitialized):
            w[0].rpc_sync("w1", abs, (-1,))
        assert w[1].rpc_sync("w3", abs, (-1,)) == 1


def test_a_missing_leader_is_named() -> None:
    with cluster(3, graceful=False) as w:
        gate = Gate()

        def end(rank: int) -> None:
            with pytest.raises(ShutdownTimeout, match=r"still missing: w0"):
                w[rank].shutdown(timeout=SOON)

        run_all([lambda: end(1), lambda: end(2)])
        gate.open()


def test_timeout_is_an_option_too() -> None:
    with (
        cluster(2, Options(shutdown_timeout=SOON), graceful=False) as w,
        pytest.raises(ShutdownTimeout, match="missing: w1"),
    ):
        w[0].shutdown()


def test_one_deadline_for_all_waits_of_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def release_all(self: Any, timeout: float) -> bool:
        limits.append(timeout)
        return True

    monkeypatch.setattr("telegrad.worker.refs.references.References.release_all", release_all)
    with cluster(2) as w:
        w.shutdown(timeout=5)
    assert len(limits) == 2
    assert all(0 < limit <= 5 for limit in limits)


def test_steps_share_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("telegrad.timeouts.time.monotonic", lambda: now)
    assert SharedDeadline(0).left() == 0
    short, long = SharedDeadline(0.5), SharedDeadline(60)
    assert (short.left(), long.left()) == (1, 60)
    now = 159.8
    assert long.left() == 1  # it begins late, but still has a second
    now = 160.6
    assert long.left() == pytest.approx(0.4)  # but all together have no more than that one
    now = 1000.0
    assert 0 < long.left() < 0.01
    assert 0 < short.left() < 0.01


def test_graceful_shutdown_waits_for_work_of_others() -> None:
    with cluster(3) as w:
        gate = Gate()
        call = w[2].rpc_async("w1", gate.enter, ("done",))
        gate.wait_for()
        ends = [threading.Thread(target=worker.shutdown) for worker in w]
        for end in ends:
            end.start()
        ends[0].join(SOON)
        assert ends[0].is_alive()
        gate.open()
        for end in ends:
            end.join(20)
        assert call.wait() == "done"
        w.workers.clear()


def chain(path: list[str], gate: Gate) -> str:
    """Handler that starts further work."""
    gate.enter()
    return str(rpc.rpc_sync(path[0], chain, (path[1:], gate))) if path else "end"


def test_graceful_shutdown_waits_for_further_work() -> None:
    with cluster(3) as w:
        gate = Gate()
        call = w[2].rpc_async("w1", chain, (["w0", "w2", "w1", "w0"], gate))
        gate.wait_for()
        ends = [threading.Thread(target=worker.shutdown) for worker in w]
        for end in ends:
            end.start()
        gate.open()
        for end in ends:
            end.join(20)
        assert call.wait() == "end"
        w.workers.clear()


def shut_down_here(graceful: bool, timeout: float) -> str:
    from telegrad.rpc.api import shutdown_worker

    scope = current.get()
    assert scope is not None
    try:
        shutdown_worker(scope.worker, graceful, timeout)
    except ShutdownTimeout as e:
        results.append(str(e))
    else:
        results.append("ended")
    return "survived"


results: list[str] = []


def test_shutdown_without_grace_in_a_handler() -> None:
    """The shutdown does not wait for its own handler."""
    results.clear()
    with cluster(2, graceful=False, check=False) as w:
        call = w[0].rpc_async("w1", shut_down_here, (False, SOON))
        with pytest.raises(WorkerLost, match="worker w1 is lost: it shut down"):
            call.wait()
        assert w[1]._worker.closed
        eventually(lambda: results)
        assert results == ["ended"]
        assert w[0].rpc_sync("w0", abs, (-1,)) == 1


def shut_down_in_a_callback() -> None:
    rpc.rpc_async("w1", abs, (-1,)).then(lambda _: shut_down_here(True, 0)).wait()


async def shut_down_in_a_coroutine() -> str:
    return shut_down_here(True, 0)


async def shut_down_in_a_task() -> str:
    return await asyncio.create_task(shut_down_in_a_coroutine())


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (shut_down_here, (True, 0)),
        (shut_down_in_a_callback, ()),
        (shut_down_in_a_coroutine, ()),
        (shut_down_in_a_task, ()),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graceful_shutdown_in_a_handler_is_an_error(function: Any, args: Any, dynamic: bool) -> None:
    with cluster(2, dynamic=dynamic) as w:
        with pytest.raises(RuntimeError, match=r"shutdown\(\) was called in a handler.*graceful=False"):
            w[0].rpc_sync("w1", function, args)
        with pytest.raises(RuntimeError, match="was called in a handler"):
            w[0].remote("w1", function, args).to_here()
        assert not w[1]._worker.closed
        assert w[0].rpc_sync("w1", abs, (-1,)) == 1


def shut_down_default() -> None:
    rpc.shutdown()


def test_it_is_one_of_the_default_worker_too(two_alone: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = rpc.api._get_current_rpc_agent()
    monkeypatch.setattr(rpc.api, "_agent", agent)
    with pytest.raises(RuntimeError, match="was called in a handler"):
        two_alone[0].rpc_sync("w1", shut_down_default)
    assert rpc.api._agent is agent


def test_shutdown_in_a_callback(two_alone: Cluster) -> None:
    w = two_alone
    done = threading.Event()

    def end(_: Any) -> None:
        w[0].shutdown(graceful=False)
        done.set()

    w[0].rpc_async("w1", abs, (-1,)).add_done_callback(end)
    assert done.wait(10)


@pytest.fixture
def two_alone() -> Any:
    with cluster(2, graceful=False, check=False) as w:
        yield w


def test_shutdown_without_grace_ends_calls_on_both_sides(two_alone: Cluster) -> None:
    w, gate = two_alone, Gate()
    mine = w[0].rpc_async("w1", gate.enter)
    theirs = w[1].rpc_async("w0", gate.enter)
    gate.wait_for(2)
    end = threading.Thread(target=lambda: w[0].shutdown(graceful=False))
    end.start()
    with pytest.raises(NotInitialized, match="was pending when this worker shut down"):
        mine.wait()
    with pytest.raises(WorkerLost, match="w0 is lost: it shut down"):
        theirs.wait()
    gate.open()
    end.join(10)
    assert not end.is_alive()


def test_a_late_worker_learns_that_others_gave_up() -> None:
    """The last worker is alone, but the group has not shut down together."""
    with cluster(3, graceful=False) as w:
        for worker in w[:2]:
            with pytest.raises(ShutdownTimeout, match=r"gave up after 0\.\d+ s"):
                worker.shutdown(timeout=SOON)
        with pytest.raises(ShutdownTimeout, match=r"other workers timed out and left before \(w0, w1\)"):
            w[2].shutdown()
        assert all(worker._worker.closed for worker in w)


def test_a_worker_that_leaves_with_pending_work_says_so() -> None:
    with cluster(2, dynamic=True, graceful=False) as w:
        gate = Gate()
        mine, theirs = w[1].rpc_async("w0", gate.enter), w[0].rpc_async("w1", gate.enter)
        gate.wait_for(2)

        def open_at_end() -> None:
            eventually(lambda: w[1]._worker.closed)
            gate.open()

        with pytest.raises(ShutdownTimeout, match=r"gave up after 0\.2 s; calls or requests are still pending\."):
            run_all([lambda: w[1].shutdown(timeout=SOON), open_at_end])
        with pytest.raises(NotInitialized, match="was pending when this worker shut down"):
            mine.wait()
        with pytest.raises(WorkerLost, match="w1 is lost"):
            theirs.wait()


def test_shutdown_from_two_threads_at_once() -> None:
    with cluster(2) as w:
        run_all([w[0].shutdown, w[0].shutdown, w[1].shutdown])
        assert all(worker._worker.closed for worker in w)


def test_shutdown_without_grace_ends_a_graceful_one_that_hangs() -> None:
    with cluster(2, graceful=False) as w:
        gave_up = threading.Event()

        def end() -> None:
            with pytest.raises(NotInitialized, match="Another thread has shut down the worker in the meantime"):
                w[0].shutdown()
            gave_up.set()

        hangs = threading.Thread(target=end)
        hangs.start()
        eventually(lambda: w[0]._worker.shutdown_lock.locked())
        w[0].shutdown(graceful=False)
        assert gave_up.wait(10)
        hangs.join()


def test_a_graceful_shutdown_of_a_worker_out_of_its_group_names_the_reason() -> None:
    with cluster(2, graceful=False) as w:
        failures: list[str] = []

        def end() -> None:
            with pytest.raises(NotInitialized) as caught:
                w[0].shutdown()
            failures.append(str(caught.value))

        hangs = threading.Thread(target=end)
        hangs.start()
        eventually(lambda: w[0]._worker.shutdown_lock.locked())
        w[0]._worker.fence("its lease has expired")
        hangs.join(10)
        assert len(failures) == 1
        assert "worker w0 is out of its group: its lease has expired. Start it again" in failures[0]


@pytest.mark.parametrize("graceful", [False, True])
def test_a_second_shutdown_waits_for_the_first(graceful: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(2, graceful=False) as w:
        core, stopping = w[0]._worker, Gate()
        stop = core.timers.stop

        def stop_late(timeout: float) -> bool:
            stopping.enter()
            return stop(timeout)

        monkeypatch.setattr(core.timers, "stop", stop_late)
        first = threading.Thread(target=w[0].shutdown, args=(False,))
        first.start()
        stopping.wait_for()
        ended = []
        seconds = [threading.Thread(target=lambda end=end: ended.append(end())) for end in (w[0].shutdown, core.close)]
        seconds.append(threading.Thread(target=lambda: ended.append(w[0].shutdown(graceful))))
        for second in seconds:
            second.start()
        seconds[0].join(0.1)  # as good as never
        assert not ended
        stopping.open()
        for thread in (first, *seconds):
            thread.join(20)
        assert ended == [None] * 3
        assert not core.pool.threads()


def test_a_close_within_a_close_waits_for_nothing() -> None:
    with cluster(2, graceful=False, check=False) as w:
        core = w[0]._worker
        future = w[0].rpc_async("w1", Gate().enter)
        future.add_done_callback(lambda _: core.close())
        core.close()
        assert core.closed
        w[1].shutdown(graceful=False)


PROGRAM = """
import sys, threading
from telegrad import rpc
rank, where = int(sys.argv[1]), sys.argv[2]
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=rpc.Options(init_method=where))
other = f"w{1 - rank}"
rpc.rpc_sync(other, abs, (-1,))
rref = rpc.remote(other, dict)
future = rpc.rpc_async(other, abs, (-1,))
done = threading.Event()
future.add_done_callback(lambda _: done.set())
assert done.wait(30)
rref.to_here()  # what the other's end would cut off would rightly be complained of
rpc.api._barrier({"w0", "w1"})
if rank == 0:
    END
print("came to its end")
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param("pass", 0, id="end"),
        pytest.param("sys.exit(3)", 3, id="exit", marks=pytest.mark.slow),
        pytest.param("raise KeyboardInterrupt", -2, id="interrupt", marks=pytest.mark.slow),
    ],
)
def test_programs_without_shutdown_exit_silently(tmp_path: Path, end: str, code: int) -> None:
    """Complete programs: the interpreter exits with live threads, futures, references."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("END", end))
    both = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), f"file://{tmp_path}/store"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=40) for process in both]
    assert both[0].returncode == code
    if code != -2:
        assert said[0][1] == ""
    else:
        assert said[0][1].strip().endswith("KeyboardInterrupt")
    assert (both[1].returncode, said[1]) == (0, ("came to its end\n", ""))


async def blocks_the_loop(gate: Gate) -> None:
    gate.enter()


async def ignores_cancellation(gate: Gate) -> None:
    gate.entered.release()
    while not gate.is_open():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("handler", [blocks_the_loop, ignores_cancellation])
def test_shutdown_abandons_coroutines_that_do_not_end(
    handler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("telegrad.worker.worker._JOIN_TIMEOUT", SOON)
    gate = Gate()
    with cluster(2, graceful=False) as w:
        call = w[0].rpc_async("w1", handler, (gate,))
        gate.wait_for()
        run_all([lambda: w[1].shutdown(graceful=False)], timeout=5)  # the gate alone would take 10
        assert "a handler still ran: its thread continues" in caplog.text
        gate.open()  # then its thread ends too
        with pytest.raises(WorkerLost):
            call.wait()


def call_while_closing() -> None:
    """Make a call on a worker that closes and can still reply."""
    scope = current.get()
    assert scope is not None
    scope.worker.closed = True
    rpc.rpc_sync("w0", abs, (-1,))


def test_calls_of_a_worker_that_leaves_fail_with_its_loss() -> None:
    """Its handlers get NotInitialized, which would say that the caller is in no group."""
    with cluster(2, graceful=False) as w, w[0]:
        rpc.rpc_sync("w1", abs, (-1,))
        future = rpc.rpc_async("w1", call_while_closing)
        leaving = w[1]._worker
        eventually(lambda: leaving.closed and not leaving.engine.stats()["running_requests"])
        leaving.closed = False
        w[1].shutdown(graceful=False)
        with pytest.raises(WorkerLost):
            future.wait()
