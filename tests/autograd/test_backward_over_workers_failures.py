"""Failures of backward passes over workers."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_backward_over_workers import leaf, no_leaks, scalar, table
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.autograd.passes.messages import ABORT
from telegrad.errors import NotInitialized, RemoteError, RpcTimeout, WorkerLost
from telegrad.testing import Cluster, LeakError, assert_quiescent, cluster, eventually

__all__ = ["no_leaks"]  # a fixture of every test


def failing(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(fail)
    return y


def fail(gradient: Tensor) -> None:
    raise KeyError("no such gradient")


def test_an_error_is_raised_with_its_origin(four: Cluster) -> None:
    x = leaf(3)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("w2", failing, (x,))
        z = rpc.rpc_sync("w1", scalar, (y,))
        for _ in range(3):
            with pytest.raises(KeyError, match="no such gradient") as caught:
                autograd.backward(context_id, [z], retain_graph=True)
            assert isinstance(caught.value, RemoteError)
            assert caught.value.worker == "w2"
            assert "in fail" in caught.value.remote_traceback
        autograd.backward(context_id, [rpc.rpc_sync("w1", scalar, (x,))])
        assert x in autograd.get_gradients(context_id), "the context is as good as before"


def test_a_local_error(four: Cluster) -> None:
    x = leaf(3)
    with autograd.context() as context_id:
        with pytest.raises(KeyError, match="no such gradient") as caught:
            autograd.backward(context_id, [failing(rpc.rpc_sync("w1", scalar, (x,)))])
        assert not isinstance(caught.value, RemoteError)
        y = rpc.rpc_sync("w1", scalar, (failing(x),))
        with pytest.raises(KeyError, match="no such gradient") as caught:
            autograd.backward(context_id, [y])
        assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("when", ["first", "last"])
def test_an_exception_of_a_signal_handler_is_raised_unchanged(four: Cluster, when: str) -> None:
    x = leaf(3)

    def interrupt(gradient: Tensor) -> None:  # as if the signal came now
        raise KeyboardInterrupt

    with autograd.context() as context_id:
        y = rpc.rpc_sync("w1", scalar, (x,)) * 2
        hook = (y if when == "first" else x).register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            autograd.backward(context_id, [y], retain_graph=True)
        hook.remove()
        autograd.backward(context_id, [y])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 4.0, dtype=torch.float64))


def test_an_error_reaches_the_root_before_slower_gradients(four: Cluster) -> None:
    x = leaf(3)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("w1", rpc.rpc_sync, ("w2", rpc.rpc_sync, ("w3", failing, (x,))))
        with pytest.raises(KeyError) as caught:
            autograd.backward(context_id, [y.sum()])
        assert caught.value.worker == "w3"  # type: ignore[attr-defined]


_gate, _inside = threading.Event(), threading.Event()


def slow(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(wait)
    return y


def wait(gradient: Tensor) -> None:
    _inside.set()
    assert _gate.wait(30)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    _gate.clear()
    _inside.clear()
    yield _gate
    _gate.set()


def test_the_timeout_reports_the_outstanding_gradients(four: Cluster, gate: threading.Event) -> None:
    calls = four[0]._worker.calls
    x = leaf(3)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("w1", rpc.rpc_sync, ("w2", slow, (x,))).sum()
        usual, calls.default_timeout = calls.default_timeout, 200_000_000
        try:
            with pytest.raises(RpcTimeout, match=r"waiting for worker w[12]: 1 x gradients") as caught:
                autograd.backward(context_id, [y])
        finally:
            calls.default_timeout = usual
        assert caught.value.timeout == 0.2
        assert "larger rpc_timeout" in str(caught.value)  # backward has no timeout= of its own
        gate.set()
        eventually(lambda: not four[2]._worker.autograd.passes.count)


def test_late_messages_do_not_end_another_pass(four: Cluster, gate: threading.Event) -> None:
    x = leaf(3)
    passes: Any = four[0]._worker.autograd.passes  # type: ignore[attr-defined]
    late: list[Any] = []
    with autograd.context() as context_id:
        y = rpc.rpc_sync("w1", after, (x, "w2", slow)).sum()
        z = rpc.rpc_sync("w3", scalar, (x,)) * 2
        z.register_hook(lambda _: late.extend(table(four[0])[context_id].passes.values()))

        def second() -> None:
            assert _inside.wait(20)
            with four[0]:
                autograd.backward(context_id, [z])
            passes.send(late[-1], 1, [(ABORT, "late")], None)
            eventually(lambda: (0, late[-1].number) in table(four[1])[context_id].passes)
            _gate.set()

        thread = threading.Thread(target=second)
        thread.start()
        calls = four[0]._worker.calls
        usual, calls.default_timeout = calls.default_timeout, 5_000_000_000
        try:
            autograd.backward(context_id, [y])
        finally:
            calls.default_timeout = usual
            thread.join()
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 8.0, dtype=torch.float64))


def test_a_pass_that_begins_later_does_not_end_one_that_begins_at_once(
    four: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = leaf(3)
    passes: Any = four[0]._worker.autograd.passes  # type: ignore[attr-defined]
    with autograd.context() as context_id:
        losses = [rpc.rpc_sync("w1", scalar, (x,)) for _ in range(2)]

        def second() -> None:
            with four[0]:
                autograd.backward(context_id, [losses[1]])

        thread = threading.Thread(target=second)

        class Interrupting:
            """Lock of the numbers, at whose end the second pass begins."""

            def __enter__(self) -> None:
                monkeypatch.undo()

            def __exit__(self, *_: object) -> None:
                thread.start()
                if not table(four[0])[context_id].lock.locked():  # then the second can overtake this one
                    thread.join()

        monkeypatch.setattr(four[0]._worker.calls, "default_timeout", 5_000_000_000)
        monkeypatch.setattr(passes, "_number_lock", Interrupting())
        autograd.backward(context_id, [losses[0]])
        thread.join()
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 4.0, dtype=torch.float64))


def after(x: Tensor, to: str, function: Any) -> Tensor:
    return function(rpc.rpc_sync(to, double, (x,)))  # type: ignore[no-any-return]


def double(x: Tensor) -> Tensor:
    return x * 2


def train_slowly(x: Tensor) -> str:
    with autograd.context() as context_id:
        y = rpc.rpc_sync("w2", slow, (x,)).sum()
        try:
            autograd.backward(context_id, [y])
        except RpcTimeout as e:
            return str(e)
    return "in time"


def test_a_pass_in_a_handler_has_the_callers_deadline(four: Cluster, gate: threading.Event) -> None:
    try:
        said = rpc.rpc_sync("w1", train_slowly, (leaf(3),), timeout=0.2)
    except RpcTimeout as e:  # both have the same deadline
        said = str(e)
    assert "ran for more than" in said
    eventually(lambda: not four[1]._worker.autograd.passes.count)
    gate.set()
    eventually(lambda: not four[2]._worker.engine.stats()["running_requests"])


def test_leaving_the_context_ends_the_pass(four: Cluster, gate: threading.Event) -> None:
    x = leaf(3)
    opened = autograd.context()
    context_id = opened.__enter__()
    y = rpc.rpc_sync("w1", slow, (x,)).sum()

    def leave() -> None:
        assert _inside.wait(20)
        with four[0]:
            autograd.api._release_context(context_id)

    thread = threading.Thread(target=leave)
    thread.start()
    with pytest.raises(RuntimeError, match="ended while a backward pass ran in it"):
        autograd.backward(context_id, [y])
    thread.join()
    opened.__exit__(None, None, None)


def test_a_loss_that_ends_the_context_during_a_pass(four: Cluster, gate: threading.Event) -> None:
    """The error names the lost worker, also if another one than the root has lost it."""
    x = leaf(3)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("w1", slow, (rpc.rpc_sync("w1", slow, (x,)),)).sum()
        there = four[1]._worker.autograd.contexts

        def lose() -> None:
            assert _inside.wait(20)
            there.end(there.table[context_id], "worker 2 is lost", 2)
            gate.set()

        thread = threading.Thread(target=lose)
        thread.start()
        with pytest.raises(WorkerLost, match=f"worker w2 is lost: so autograd context {context_id} of worker w0"):
            autograd.backward(context_id, [y])
        thread.join()


def test_a_gradient_of_a_lost_worker_that_arrives_during_the_loss(four: Cluster, gate: threading.Event) -> None:
    """The records of its messages are gone, and the pass has not heard of the loss."""
    with autograd.context() as context_id:
        rpc.rpc_sync("w1", abs, (-1,))  # in the context, so it goes on there
        y = rpc.rpc_sync("w2", after, (leaf(3), "w1", slow)).sum()
        there = four[1]._worker.autograd.contexts

        def lose() -> None:
            assert _inside.wait(20)
            received = there.table[context_id].requests_received
            counted = dict(received)
            there.peer_lost(2, 1)
            received.update(counted)  # in truth the session goes on
            gate.set()

        thread = threading.Thread(target=lose)
        thread.start()
        with pytest.raises(WorkerLost, match="worker w2 is lost: so the records of its messages"):
            autograd.backward(context_id, [y])
        thread.join()


def test_a_worker_without_its_schedule_reports_an_error(four: Cluster) -> None:
    x = leaf(3)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("w1", scalar, (x,))
        there = four[1]._worker.autograd.contexts
        there.end(there.table[context_id])
        with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}.*w1"):
            autograd.backward(context_id, [y])


def test_a_lost_worker_ends_the_pass() -> None:
    with cluster(3, current=None, check=False) as group, group[0]:
        x = leaf(3)
        _gate.clear()
        _inside.clear()
        with autograd.context() as context_id:
            y = rpc.rpc_sync("w1", rpc.rpc_sync, ("w2", slow, (x,)))
            z = rpc.rpc_sync("w1", scalar, (x,))
            lost = group.workers.pop(2)

            def end() -> None:
                assert _inside.wait(20)
                threading.Timer(0.2, _gate.set).start()
                lost.shutdown(graceful=False)

            thread = threading.Thread(target=end)
            thread.start()
            with pytest.raises(WorkerLost, match="w2"):
                autograd.backward(context_id, [y.sum()])
            thread.join()
            with pytest.raises(WorkerLost, match="w2"):
                autograd.backward(context_id, [y.sum()], retain_graph=True)
            autograd.backward(context_id, [z])
            assert x in autograd.get_gradients(context_id), "what does not lead there goes on"


def test_closing_a_worker_ends_its_pass() -> None:
    with cluster(2, current=None, check=False) as group, group[0]:
        _gate.clear()
        _inside.clear()
        with autograd.context() as context_id:
            y = rpc.rpc_sync("w1", slow, (leaf(3),))

            def end() -> None:
                assert _inside.wait(20)
                group[0].shutdown(graceful=False)

            thread = threading.Thread(target=end)
            thread.start()
            with pytest.raises(NotInitialized):
                autograd.backward(context_id, [y.sum()])
            _gate.set()
            thread.join()
        group.close()


def test_an_open_context_is_a_leak() -> None:
    with cluster(2, current=None, check=False) as group, group[0]:
        core = group[0]._worker
        opened = autograd.api._new_context()
        with pytest.raises(LeakError, match="1 autograd contexts"):
            assert_quiescent(core, 0.1)
        del opened
    with pytest.raises(LeakError, match="1 autograd contexts that were not left before the end"):
        assert_quiescent(core, 0.1)
