"""The turns of handlers and steps. No test sleeps: a thread that has to wait is seen waiting."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from telegrad.autograd.gate import StepGate
from telegrad.testing import Gate, eventually, run_all

PATIENCE = 10.0


class Busy(threading.Thread):
    """Runs something in a thread; `done` says whether it has ended."""

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
        assert self.done.wait(PATIENCE)
        if self.error is not None:
            raise self.error


@contextmanager
def inside(gate: StepGate, context: int) -> Iterator[None]:
    """A handler of a context stands in the gate, in a thread of its own."""
    door = Gate()

    def handler() -> None:
        number = gate.enter(context)
        door.enter()
        gate.leave(number)

    thread = Busy(handler)
    door.wait_for()
    try:
        yield
    finally:
        door.open()
        thread.finish()


def stepping(gate: StepGate, context: int, order: list[str] | None = None, door: Gate | None = None) -> Busy:
    """A step in a thread of its own."""

    def step() -> None:
        with gate.step(context) as turn:
            if order is not None:
                order.append(f"step {context} {'alone' if turn.alone else 'among others'}")
            if door is not None:
                door.enter()

    return Busy(step)


def until_waits(gate: StepGate, context: int) -> None:
    eventually(lambda: context in gate._waiting, what="a step that waits")


def test_handlers_do_not_wait_for_each_other() -> None:
    gate = StepGate()
    with inside(gate, 1), inside(gate, 2), inside(gate, 1):
        assert len(gate._runs) == 3
    assert not gate._runs


def test_a_step_waits_for_handlers_of_other_contexts() -> None:
    gate = StepGate(still=PATIENCE)
    order: list[str] = []
    with inside(gate, 1):
        step = stepping(gate, 2, order)
        until_waits(gate, 2)
        assert not order
    step.finish()
    assert order == ["step 2 alone"]


def test_a_step_does_not_wait_for_its_own_context_or_thread() -> None:
    gate = StepGate(still=PATIENCE)
    with inside(gate, 1):
        stepping(gate, 1).finish()
    number = gate.enter(1)
    with gate.step(2) as turn:
        assert turn.alone
    gate.leave(number)


def entering(gate: StepGate, context: int, order: list[str], door: Gate | None = None) -> Busy:
    """A handler in a thread of its own."""

    def handler() -> None:
        number = gate.enter(context)
        order.append(f"handler {context}")
        if door is not None:
            door.enter()
        order.append(f"end of handler {context}")
        gate.leave(number)

    return Busy(handler)


def test_handlers_wait_for_a_step_that_waits() -> None:
    gate = StepGate(still=PATIENCE)
    order: list[str] = []
    with inside(gate, 1):
        step = stepping(gate, 2, order)
        until_waits(gate, 2)
        handler = entering(gate, 3, order)
        eventually(lambda: gate._queued, what="a handler that waits")
        assert not order
    step.finish()
    handler.finish()
    assert order == ["step 2 alone", "handler 3", "end of handler 3"]


def test_no_second_step_overtakes_a_handler_that_has_waited_for_one() -> None:
    gate = StepGate(still=PATIENCE)
    order: list[str] = []
    in_step, in_handler = Gate(), Gate()
    first = stepping(gate, 2, order, in_step)
    in_step.wait_for()
    second = stepping(gate, 4, order)
    until_waits(gate, 4)
    handler = entering(gate, 3, order, in_handler)
    eventually(lambda: gate._queued, what="a handler that waits")
    in_step.open()
    in_handler.wait_for()
    in_handler.open()
    for thread in (first, second, handler):
        thread.finish()
    assert order == ["step 2 alone", "handler 3", "end of handler 3", "step 4 alone"]


def test_a_nested_handler_passes_a_step_that_waits_for_its_caller() -> None:
    gate = StepGate(still=PATIENCE)
    with inside(gate, 1):
        step = stepping(gate, 2)
        until_waits(gate, 2)
        with inside(gate, 1):  # of the same context: it may be what the first one waits for
            assert not step.done.is_set()
    step.finish()


def test_handlers_of_the_context_whose_step_waits_pass() -> None:
    gate = StepGate(still=PATIENCE)
    with inside(gate, 1):
        step = stepping(gate, 2)
        until_waits(gate, 2)
        with inside(gate, 2):
            assert not step.done.is_set()
    step.finish()


def test_steps_hold_the_gate_one_after_another() -> None:
    gate = StepGate()
    inside_now: list[int] = []

    def step(context: int) -> None:
        for _ in range(200):
            with gate.step(context):
                inside_now.append(context)
                assert inside_now == [context]
                inside_now.remove(context)

    run_all([lambda c=c: step(c) for c in range(4)])  # type: ignore[misc]


def test_a_step_goes_on_when_those_it_waits_for_stand_still(caplog: pytest.LogCaptureFixture) -> None:
    gate = StepGate(still=0.1)
    order: list[str] = []
    with inside(gate, 1), caplog.at_level(logging.WARNING, "telegrad"):
        stepping(gate, 2, order).finish()  # the handler waits for the end of this very block
    assert order == ["step 2 among others"]
    assert "a step of autograd context 2 goes on while 1 handlers" in caplog.text


def test_a_step_waits_for_a_handler_that_works(caplog: pytest.LogCaptureFixture) -> None:
    gate = StepGate(still=0.2)
    order: list[str] = []
    enough, working = threading.Event(), threading.Event()

    def work() -> None:
        number = gate.enter(1)
        working.set()
        while not enough.is_set():
            sum(range(1000))
        gate.leave(number)

    handler = Busy(work)
    assert working.wait(PATIENCE)
    step = stepping(gate, 2, order)
    assert not step.done.wait(1.0)  # five times as long as it waits for one that stands still
    enough.set()
    handler.finish()
    step.finish()
    assert order == ["step 2 alone"]
    assert not caplog.records


def test_a_step_waits_no_longer_than_that_even_for_one_that_works() -> None:
    gate = StepGate(still=PATIENCE, most=0.2)
    order: list[str] = []
    enough, working = threading.Event(), threading.Event()

    def work() -> None:
        number = gate.enter(1)
        working.set()
        while not enough.is_set():
            sum(range(1000))
        gate.leave(number)

    handler = Busy(work)
    assert working.wait(PATIENCE)
    stepping(gate, 2, order).finish()
    enough.set()
    handler.finish()
    assert order == ["step 2 among others"]


def test_bodies_hold_nothing_up_but_are_known() -> None:
    gate = StepGate()
    gate.open_body(1)
    gate.open_body(1)
    with gate.step(2) as turn:
        assert turn == (True, False)
    with gate.step(1) as turn:
        assert turn == (True, True)
    gate.close_body(1)
    with gate.step(2) as turn:
        assert not turn.unwatched
    gate.close_body(1)
    with gate.step(2) as turn:
        assert turn == (True, True)


def test_a_step_that_fails_leaves_the_gate() -> None:
    gate = StepGate()
    with pytest.raises(KeyError), gate.step(1):
        raise KeyError
    with inside(gate, 2):
        pass
    with gate.step(1) as turn:
        assert turn.alone


class Alarm(Exception):
    """What a signal handler raises."""


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Has a signal handler raise in the main thread."""

    def on_signal(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGUSR1, on_signal)
    yield lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_while_a_handler_waits_leaves_the_gate(interrupt: Callable[[], None]) -> None:
    gate = StepGate(still=PATIENCE)
    with inside(gate, 1):
        step = stepping(gate, 2)
        until_waits(gate, 2)

        def send() -> None:
            eventually(lambda: gate._queued, what="a handler that waits")
            interrupt()

        sender = Busy(send)
        with pytest.raises(Alarm):
            gate.enter(3)
        sender.finish()
    for thread in (step, stepping(gate, 2), stepping(gate, 4)):
        thread.finish()


def test_a_signal_while_a_step_waits_leaves_the_gate(interrupt: Callable[[], None]) -> None:
    gate = StepGate(still=PATIENCE)
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
