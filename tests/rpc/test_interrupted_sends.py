"""Signal handlers that raise while streams and maps send their requests.

Python runs a handler between two bytecodes. So these tests raise before each bytecode of the functions that send, in
turn. For handlers that raise while the core sends see `test_interrupted_processes.py`.
"""

import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
from map_helpers import mapping
from stream_helpers import bursts

from telegrad import rpc
from telegrad.rpc.map_items import Source
from telegrad.streams import receiver, stream
from telegrad.streams.service import Streams
from telegrad.testing import Cluster, Gate, eventually


class Alarm(BaseException):
    """Exception of a signal handler."""


class Timer(Exception):
    """Exception of a signal handler, of a class that a program may catch."""


def interrupted(run: Callable[[], object], *functions: Callable[..., object]) -> Iterator[int]:
    """Run a function until it ends; yield after each run that was interrupted.

    The n-th run raises before the n-th bytecode of the functions.
    """
    codes = {function.__code__ for function in functions}
    for at in itertools.count():
        if not _is_interrupted(run, codes, at):
            assert at > 20
            return
        yield at


def _is_interrupted(run: Callable[[], object], codes: set[CodeType], at: int) -> bool:
    steps = itertools.count()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(steps) == at:
            raise Alarm
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except Alarm:
        return True
    finally:
        sys.settrace(before)
    return False


def counts() -> Iterator[int]:
    yield from itertools.count()


@pytest.mark.usefixtures("clean")
def test_an_interrupted_stream_is_closed(two: Cluster) -> None:
    tables = [Streams.of(worker._worker) for worker in two]

    def open_and_close() -> None:
        rpc.stream("w1", counts).close()

    for at in interrupted(open_and_close, stream.open_stream, receiver.Receiver.open):
        eventually(
            lambda: not any(any(table.left().values()) for table in tables), what=f"the end of the stream at step {at}"
        )


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("kind", [Alarm, Timer])
@pytest.mark.parametrize("request_of", ["pull", "flush"])
def test_a_stream_ends_if_a_request_for_items_is_interrupted(
    two: Cluster, kind: type[BaseException], request_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_signal(*_: object) -> None:
        raise kind

    def interrupted(worker: Any, peer: int, scope: Any, function: Any, *args: Any, **how: Any) -> Any:
        future = start_step(worker, peer, scope, function, *args, **how)
        if function.__name__ == request_of and sys._getframe(3).f_code in readers:
            signal.raise_signal(signal.SIGUSR1)
        return future

    start_step, gate = receiver.start_step, Gate()
    readers = {receiver.Receiver.take.__code__, stream.Stream._wait.__code__}  # not a callback, whose errors are logged
    before = signal.signal(signal.SIGUSR1, on_signal)
    items = rpc.stream("w1", counts, prefetch=2) if request_of == "pull" else rpc.stream("w1", bursts, (gate,))
    reader = items._receiver

    def read_until_interrupted() -> None:
        while True:
            if request_of == "pull":
                eventually(lambda: not reader._is_pulling)  # so that this thread sends the next request
            with monkeypatch.context() as patch:
                patch.setattr(receiver, "start_step", interrupted)
                next(items)

    try:
        next(items)
        with pytest.raises(kind):
            read_until_interrupted()
    finally:
        signal.signal(signal.SIGUSR1, before)
    gate.open()
    tables = [Streams.of(worker._worker) for worker in two]
    eventually(lambda: not any(any(table.left().values()) for table in tables))
    assert reader.is_settled


def until_canceled(item: int) -> None:
    if item > 0:
        eventually(rpc.cancelled)


@pytest.mark.usefixtures("clean")
def test_an_interrupted_chunk_is_canceled(two: Cluster) -> None:
    engine, parts = two[1]._worker.engine, mapping._Mapping

    def begin_and_close() -> None:
        mapped = rpc.map("w1", until_canceled, range(2), chunk=1, timeout=0)
        next(mapped)
        mapped.close()

    def canceled() -> bool:
        return not engine.stats()["running_requests"]

    for at in interrupted(begin_and_close, parts._send, parts._start, parts._follow):
        eventually(canceled, 5, what=f"the cancellation at step {at}")


@pytest.mark.usefixtures("clean")
def test_map_raises_at_once_if_a_signal_handler_raises_in_the_items() -> None:
    def on_signal(*_: object) -> None:
        raise Timer

    def items() -> Iterator[int]:
        yield 0
        signal.raise_signal(signal.SIGUSR1)
        yield 1

    before = signal.signal(signal.SIGUSR1, on_signal)
    source = Source(items(), copy=lambda item: item)
    try:
        with pytest.raises(Timer):
            source.take(2, None)
        with pytest.raises(Timer):
            next(rpc.map("w1", abs, items(), chunk=2))
    finally:
        signal.signal(signal.SIGUSR1, before)
