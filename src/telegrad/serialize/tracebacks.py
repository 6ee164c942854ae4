"""Tracebacks of exceptions that are stored, sent or raised again.

Users see tracebacks without Telegrad's own frames.
"""

import copy
import functools
import os
import signal
import threading
import traceback
from collections.abc import Callable
from types import CodeType
from typing import TypeVar

import torch

import telegrad
from telegrad.errors import TelegradError
from telegrad.types import WorkerInfo

__all__ = [
    "RemoteTraceback",
    "clear_frames",
    "clone_exception",
    "drop_frames",
    "frames_cleared",
    "is_interrupt",
    "is_own_file",
    "set_cause",
    "show_exception",
    "strip_own_frames",
    "text_of",
    "traceback_of",
    "type_name",
]

E = TypeVar("E", bound=BaseException)

TRACEBACK = "_telegrad_traceback"
"""Attribute of an exception without its frames: the traceback as text."""


class RemoteTraceback(Exception):
    """Traceback of another process, as text.

    It is the ``__cause__`` of exceptions raised in that process.

    Attributes:
        worker: Name of the worker.
        worker_id: Its rank.
        original_type: Name of the exception's type, with its module.
        remote_traceback: The traceback.
    """

    def __init__(self, worker: str, worker_id: int, remote_traceback: str, original_type: str = "") -> None:
        super().__init__(worker, worker_id, remote_traceback)
        self.worker = worker
        self.worker_id = worker_id
        self.original_type = original_type
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        worker, worker_id, trace = self.args
        return f'on worker {worker} (rank {worker_id})\n"""\n{trace}"""'


def type_name(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def show_exception(exc: BaseException) -> str:
    """Return ``repr(exc)``, or a replacement if that raises."""
    try:
        return repr(exc)
    except BaseException as e:  # user code; its SystemExit must not end this thread
        return f"<{type_name(type(exc))}: its repr() raised {type(e).__name__}>"


def text_of(exc: BaseException) -> str:
    """Return ``str(exc)``, or `show_exception` if that raises."""
    try:
        return str(exc)
    except BaseException:  # as in show_exception
        return show_exception(exc)


def is_interrupt(exc: BaseException) -> bool:
    """Return whether a signal handler may have raised the exception.

    Then the calling thread, which is the main thread, must raise it. In other threads user code has raised it, such as
    SystemExit while a value was unpickled.
    """
    return not isinstance(exc, Exception) and threading.current_thread() is threading.main_thread()


def is_of_signal_handler(exc: BaseException) -> bool:
    """Return whether a signal handler of the program has raised the exception."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {code for handler in handlers if (code := _code_of(handler)) is not None}
    frames = traceback.walk_tb(exc.__traceback__)
    return any(frame.f_code in codes for frame, _ in frames)


def _code_of(function: object) -> CodeType | None:
    if isinstance(function, functools.partial):
        return _code_of(function.func)
    function = getattr(function, "__func__", function)  # of a method
    if callable(function) and not hasattr(function, "__code__"):
        function = type(function).__call__
    return getattr(function, "__code__", None)


def clear_frames(exc: BaseException, worker: WorkerInfo) -> None:
    """Replace an exception's traceback by its text.

    Called before an exception is stored to be raised again. The frames would keep all variables of the failed call
    alive.
    """
    text = exc.__dict__[TRACEBACK] = traceback_of(exc)
    if exc.__cause__ is None:
        set_cause(exc, RemoteTraceback(worker.name, worker.id, text, type_name(type(exc))))
    drop_frames(exc)


def set_cause(exc: BaseException, cause: BaseException | None) -> None:
    """Set the cause, also on a class that forbids setting attributes."""
    BaseException.__setattr__(exc, "__cause__", cause)


def frames_cleared(exc: BaseException) -> bool:
    """Return whether `clear_frames` has replaced the traceback of an exception."""
    return TRACEBACK in exc.__dict__


def drop_frames(exc: BaseException) -> None:
    """Remove the tracebacks of an exception and of its causes and contexts."""
    todo: list[BaseException | None] = [exc]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            BaseException.with_traceback(one, None)
            todo += (one.__cause__, one.__context__, *getattr(one, "exceptions", ()))


def clone_exception(exc: BaseException) -> BaseException:
    """Return a copy of a stored exception, to be raised.

    Raising the stored exception itself would add the frames of each caller to it and keep their variables alive.
    """
    again = _copied(copy.copy, exc)
    if again is None:  # the constructor takes other arguments than the args
        again = _copied(_copy_without_constructor, exc)
    if again is None:
        return exc.with_traceback(None)
    set_cause(again, again.__cause__ or exc.__cause__)  # setting a cause also hides the context
    return again


def _copied(copier: Callable[[BaseException], object], exc: BaseException) -> BaseException | None:
    """Return a copy, or None if the copier fails or returns something else."""
    try:
        again = copier(exc)
    except Exception:  # user code, such as a constructor
        return None
    return again if isinstance(again, BaseException) and type(again) is type(exc) and again is not exc else None


def _copy_without_constructor(exc: BaseException) -> BaseException:
    again = type(exc).__new__(type(exc), *exc.args)
    BaseException.__setattr__(again, "args", exc.args)  # also on a class that forbids setting attributes
    again.__dict__.update(exc.__dict__)
    return again


def traceback_of(exc: BaseException) -> str:
    """Return the traceback as Python prints it, without Telegrad's own frames."""
    kept = exc.__dict__.get(TRACEBACK)
    if isinstance(kept, str):
        return kept
    try:
        trace = traceback.TracebackException(type(exc), exc, exc.__traceback__)
        _drop_own_frames(exc, trace)
        return "".join(trace.format())
    except BaseException:  # user code: a broken __str__ or __cause__
        return "".join(traceback.format_tb(exc.__traceback__)) + show_exception(exc) + "\n"


_OURS = os.path.join(os.path.dirname(telegrad.__file__), "")
_EXAMPLES = os.path.join(_OURS, "examples", "")
_FUTURES = os.path.join(os.path.dirname(torch.futures.__file__), "")


def is_own_file(file: str) -> bool:
    """Return whether code of a file is Telegrad's own, or that of torch's futures."""
    return file.startswith((_OURS, _FUTURES)) and not file.startswith(_EXAMPLES)


def _drop_own_frames(exc: BaseException, trace: traceback.TracebackException) -> None:
    """Remove Telegrad's frames from each stack that has frames of the user.

    Telegrad's frames at the end of a stack stay if the error is not a TelegradError: they show a defect of Telegrad.
    A remote traceback shows the exceptions of a group, which are removed: repeated by each worker that forwards the
    group, the text would double every time.
    """
    todo: list[tuple[BaseException | None, traceback.TracebackException | None]] = [(exc, trace)]
    seen: set[int] = set()
    while todo:
        error, one = todo.pop()
        if error is None or one is None or id(one) in seen:
            continue
        seen.add(id(one))
        users = [index for index, frame in enumerate(one.stack) if not is_own_file(frame.filename)]
        if users:
            end = len(one.stack) if isinstance(error, TelegradError) else users[-1]
            one.stack[:] = [f for index, f in enumerate(one.stack) if index > end or not is_own_file(f.filename)]
        if isinstance(error.__cause__, RemoteTraceback):
            one.exceptions = None
        todo += ((error.__cause__, one.__cause__), (error.__context__, one.__context__))
        todo += zip(getattr(error, "exceptions", ()), one.exceptions or (), strict=False)


def strip_own_frames(exc: E) -> E:
    """Return the exception without Telegrad's frames, to be raised to the program.

    If Telegrad called code of the program, the traceback stays as is.
    """
    trace = exc.__traceback__
    while trace is not None and is_own_file(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return exc if trace is not None else exc.with_traceback(None)
