"""Order of handlers and optimizer steps."""

import logging
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from telegrad.autograd.consistency.step_gate import StepGate, new_gate, warn_if_overtaken
from telegrad.testing import Gate, eventually, run_all

TIMEOUT = 10.0


class Busy(threading.Thread):
    """Thread that runs a function; `done` is set at its end."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            self._function()
        except BaseException as e:
            self.error = e
        self.done.set()

    def finish(self) -> None:
        assert self.done.wait(TIMEOUT)
        if self.error is not None:
            raise self.error


@contextmanager
def inside(gate: StepGate, context: int) -> Iterator[None]:
    """Run a handler of a context inside the gate, in another thread."""
    opened = Gate()

    def handler() -> None:
        with gate.handler(context):
            opened.enter()

    thread = Busy(handler)
    opened.wait_for()
    try:
        yield
    finally:
        opened.open()
        thread.finish()


def stepping(gate: StepGate, context: int, order: list[str] | None = None, opened: Gate | None = None) -> Busy:
    """Run a step in another thread."""

    def step() -> None:
        with gate.step(context) as turn:
            if order is not None:
                order.append(f"step {context} {'among others' if turn.overtaken else 'alone'}")
            if opened is not None:
                opened.enter()
        warn_if_overtaken(turn, context)

    return Busy(step)


def until_waits(gate: StepGate, context: int) -> None:
    eventually(lambda: context in gate.waiting, what="a step that waits")


def finish(*threads: Busy) -> None:
    for thread in threads:
        thread.finish()


def test_handlers_do_not_wait_for_each_other() -> None:
    gate = new_gate()
    with inside(gate, 1), inside(gate, 2), inside(gate, 1):
        assert gate.handlers == 3
    assert gate.handlers == 0


def test_a_step_waits_for_handlers_of_other_contexts() -> None:
    gate = new_gate(TIMEOUT)
    order: list[str] = []
    with inside(gate, 1):
        step = stepping(gate, 2, order)
        until_waits(gate, 2)
        assert not order
    step.finish()
    assert order == ["step 2 alone"]


def test_a_step_does_not_wait_for_its_own_context_or_thread() -> None:
    gate = new_gate(TIMEOUT)
    with inside(gate, 1):
        stepping(gate, 1).finish()
    with gate.handler(1), gate.step(2) as turn:
        assert turn.overtaken == 0


def entering(gate: StepGate, context: int, order: list[str], opened: Gate | None = None) -> Busy:
    """Run a handler in another thread."""

    def handler() -> None:
        with gate.handler(context):
            order.append(f"handler {context}")
            if opened is not None:
                opened.enter()
            order.append(f"end of handler {context}")

    return Busy(handler)


def test_handlers_wait_for_a_waiting_step() -> None:
    gate = new_gate(TIMEOUT)
    order: list[str] = []
    with inside(gate, 1):
        step = stepping(gate, 2, order)
        until_waits(gate, 2)
        handler = entering(gate, 3, order)
        eventually(lambda: gate.queued, what="a handler that waits")
        assert not order
    finish(step, handler)
    assert order == ["step 2 alone", "handler 3", "end of handler 3"]


def test_no_second_step_overtakes_a_handler_that_has_waited_for_one() -> None:
    gate = new_gate(TIMEOUT)
    order: list[str] = []
    in_step, in_handler = Gate(), Gate()
    first = stepping(gate, 2, order, in_step)
    in_step.wait_for()
    second = stepping(gate, 4, order)
    until_waits(gate, 4)
    handler = entering(gate, 3, order, in_handler)
    eventually(lambda: gate.queued, what="a handler that waits")
    in_step.open()
    in_handler.wait_for()
    in_handler.open()
    finish(first, second, handler)
    assert order == ["step 2 alone", "handler 3", "end of handler 3", "step 4 alone"]


def test_a_nested_handler_does_not_wait_for_a_step_that_waits_for_its_caller() -> None:
    gate = new_gate(TIMEOUT)
    with inside(gate, 1):
        step = stepping(gate, 2)
        until_waits(gate, 2)
        with inside(gate, 1):  # of the same context: the first one may wait for it
            assert not step.done.is_set()
    step.finish()


def test_handlers_that_step_on_their_own_threads_do_not_wait_for_each_other() -> None:
    gate = new_gate(TIMEOUT)
    order: list[str] = []
    inside_both, out = Gate(), Gate()

    def step_inside(context: int) -> None:
        with gate.handler(context):
            inside_both.enter()
            with gate.step(context - 10) as turn:
                order.append(f"step {context} among {turn.overtaken}")
            out.enter()

    threads = [Busy(lambda c=c: step_inside(c)) for c in (1, 2)]  # type: ignore[misc]
    inside_both.wait_for(2)
    inside_both.open()
    out.wait_for(1)  # one has stepped; the other waits until it has left
    out.open()
    finish(*threads)
    assert sorted(order) == ["step 1 among 0", "step 2 among 0"]


def test_a_waiting_step_no_longer_waits_for_a_handler_that_begins_to_step() -> None:
    gate = new_gate(TIMEOUT)
    order: list[str] = []
    ready, leave = Gate(), Gate()

    def step_inside() -> None:
        with gate.handler(1):
            ready.enter()
            with gate.step(-1):
                order.append("step inside")
            leave.enter()

    handler = Busy(step_inside)
    ready.wait_for()
    with inside(gate, 3):  # both steps wait for it
        step = stepping(gate, 2, order)
        until_waits(gate, 2)
        ready.open()
        until_waits(gate, -1)
        assert not order
    leave.wait_for()
    leave.open()
    finish(handler, step)
    assert sorted(order) == ["step 2 alone", "step inside"]


def test_handlers_of_other_chains_wait_for_a_waiting_step() -> None:
    gate = new_gate(TIMEOUT)
    order: list[str] = []
    with inside(gate, -1):
        step = stepping(gate, -9, order)
        until_waits(gate, -9)
        other = entering(gate, -2, order)
        eventually(lambda: gate.queued, what="a handler that waits")
        with inside(gate, -1):  # of the same chain: the first one may wait for it
            assert not order
    finish(step, other)
    assert order == ["step -9 alone", "handler -2", "end of handler -2"]


def test_a_step_does_not_wait_for_a_chain_that_waits_for_its_own_step() -> None:
    gate = new_gate(TIMEOUT)
    order: list[str] = []
    with inside(gate, -1), inside(gate, -2):  # each waits for a step that another thread makes for it
        steps = [stepping(gate, chain, order) for chain in (-1, -2)]
        eventually(lambda: order, what="the first step")
    for step in steps:
        step.finish()
    assert sorted(order) == ["step -1 alone", "step -2 alone"]


def test_a_step_does_not_wait_for_a_handler_that_waits_for_it() -> None:
    gate = new_gate(TIMEOUT)
    order: list[str] = []
    ready, leave = Gate(), Gate()

    def handler() -> None:
        with gate.handler(1):
            ready.enter()
            with gate.blocked(0):  # for example for the lock of the parameters
                leave.enter()

    thread = Busy(handler)
    ready.wait_for()
    step = stepping(gate, 2, order)
    until_waits(gate, 2)
    ready.open()
    step.finish()
    assert order == ["step 2 alone"]
    leave.open()
    thread.finish()


def test_handlers_of_the_stepping_context_do_not_wait() -> None:
    gate = new_gate(TIMEOUT)
    with inside(gate, 1):
        step = stepping(gate, 2)
        until_waits(gate, 2)
        with inside(gate, 2):
            assert not step.done.is_set()
    step.finish()


def test_steps_are_exclusive() -> None:
    gate = new_gate()
    inside_now: list[int] = []

    def step(context: int) -> None:
        for _ in range(200):
            with gate.step(context):
                inside_now.append(context)
                assert inside_now == [context]
                inside_now.remove(context)

    run_all([lambda c=c: step(c) for c in range(4)])  # type: ignore[misc]


def test_the_wait_of_a_step_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    gate = new_gate(max_wait=0.1)
    order: list[str] = []
    with inside(gate, 1), caplog.at_level(logging.WARNING, "telegrad"):
        stepping(gate, 2, order).finish()  # the handler waits for the end of this very block
    assert order == ["step 2 among others"]
    assert "a step of autograd context 2 took effect while 1 handlers" in caplog.text


def test_after_its_limit_a_step_still_waits_for_another_step(caplog: pytest.LogCaptureFixture) -> None:
    gate = new_gate(max_wait=0.05)
    order: list[str] = []
    in_step = Gate()
    first = stepping(gate, 1, order, in_step)
    in_step.wait_for()
    second = stepping(gate, 2, order)
    until_waits(gate, 2)
    assert not second.done.wait(0.2)
    in_step.open()
    finish(first, second)
    assert order == ["step 1 alone", "step 2 alone"]
    assert not caplog.records


def test_context_bodies_block_no_step_but_are_counted() -> None:
    gate = new_gate()
    with gate.body(1):
        with gate.body(1):
            with gate.step(2) as turn:
                assert (turn.overtaken, turn.unread) == (0, False)
            with gate.step(1) as turn:
                assert turn.unread
            assert gate.bodies == 2
        with gate.step(2) as turn:
            assert not turn.unread
    with gate.step(2) as turn:
        assert turn.unread


def test_a_step_that_fails_leaves_the_gate() -> None:
    gate = new_gate()
    with pytest.raises(KeyError), gate.step(1):
        raise KeyError
    with inside(gate, 2):
        pass
    with gate.step(1) as turn:
        assert turn.overtaken == 0


def test_a_guard_is_entered_once_at_a_time() -> None:
    gate = new_gate()
    for guard in (gate.handler(1), gate.body(1), gate.step(1)):
        with guard, pytest.raises(RuntimeError, match="already entered"):
            guard.__enter__()
        with guard:
            pass
        guard.__exit__(None, None, None)  # leaves the gate once
    assert (gate.handlers, gate.bodies, gate.waiting) == (0, 0, [])


def test_hooks_that_fail_leave_the_gate() -> None:
    def refuse(*_: object) -> None:
        raise ValueError

    for push, pop in ((refuse, lambda: None), (lambda *_: None, refuse)):
        gate = StepGate(push, pop, TIMEOUT)
        for guard in (gate.handler(1, (len, len)), gate.body(1, (len, len))):
            with pytest.raises(ValueError), guard:
                pass
        assert (gate.handlers, gate.bodies) == (0, 0)


class Alarm(Exception):
    """Exception that the signal handler raises."""


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Install a signal handler that raises in the main thread."""

    def on_signal(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGUSR1, on_signal)
    yield lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_while_a_handler_waits_leaves_the_gate(interrupt: Callable[[], None]) -> None:
    gate = new_gate(TIMEOUT)
    with inside(gate, 1):
        step = stepping(gate, 2)
        until_waits(gate, 2)

        def send() -> None:
            eventually(lambda: gate.queued, what="a handler that waits")
            interrupt()

        sender = Busy(send)
        with pytest.raises(Alarm), gate.handler(3):
            raise AssertionError("a step waits")
        sender.finish()
    for thread in (step, stepping(gate, 2), stepping(gate, 4)):
        thread.finish()


def test_a_signal_while_a_step_waits_leaves_the_gate(interrupt: Callable[[], None]) -> None:
    gate = new_gate(TIMEOUT)
    with inside(gate, 1):

        def send() -> None:
            until_waits(gate, 2)
            interrupt()

        sender = Busy(send)
        with pytest.raises(Alarm), gate.step(2):
            raise AssertionError("a handler is inside")
        sender.finish()
        stepping(gate, 1).finish()
    with inside(gate, 3):
        pass


@pytest.mark.parametrize("kind", ["handler", "body", "step"])
def test_many_signals_leave_the_gate_consistent(kind: str) -> None:
    """A signal may raise between any two bytecodes; the counts stay consistent."""
    gate = new_gate(TIMEOUT)
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with gate.handler(2):
                pass

    def step() -> None:
        while not stop.is_set():
            with gate.step(3):
                pass

    random_ = random.Random(0)
    armed = False
    alarms = 0

    def on_alarm(*_: object) -> None:
        nonlocal alarms
        if armed:
            alarms += 1
            raise Alarm

    before = signal.signal(signal.SIGALRM, on_alarm)
    others = [Busy(read), Busy(step)]
    make: Callable[[int], Any] = getattr(gate, kind)
    try:
        while alarms < 300:
            with suppress(Alarm):
                armed = True
                signal.setitimer(signal.ITIMER_REAL, random_.uniform(1e-6, 1e-3))
                while True:
                    with make(1):
                        pass
        armed = False
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        stop.set()
    for thread in others:
        thread.finish()
    assert (gate.handlers, gate.bodies, gate.queued, gate.waiting) == (0, 0, 0, [])
    with gate.step(1) as turn:
        assert turn.unread
