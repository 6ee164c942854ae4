"""Callbacks of futures: the scope in which they run, and their errors."""

import operator
import traceback
from collections.abc import Callable
from typing import TypeVar

from telegrad.serialize.tracebacks import drop_frames, is_own_file, text_of
from telegrad.worker.calls import tracing
from telegrad.worker.scope import current

__all__ = ["bind_scope", "is_copy", "of_callback"]

A = TypeVar("A")
S = TypeVar("S")


def bind_scope(callback: Callable[[A], S]) -> Callable[[A], S]:
    """Bind a callback to the scope of the caller, in whichever thread it runs.

    Calls of the callback end with the same request and use the same worker.

    Raises:
        TypeError: The callback is not callable; the text is torch's.
    """
    if not callable(callback):
        raise TypeError(f"incompatible function arguments. A callback has to be callable, which {callback!r} is not.")
    scope = current.get()
    if scope is None:
        return callback
    if tracing.observer.on and (recording := tracing.recording.get()) is not None:
        callback = tracing.bind_recording(recording, callback)

    def run(done: A) -> S:
        here = current.get()
        if here is scope:
            return callback(done)
        depth = scope.depth if here is None else max(scope.depth, here.depth)
        token = current.set(scope._replace(depth=depth, request=False))
        guard = None if scope.autograd is None else scope.worker.autograd.context_guard(scope.autograd)
        try:
            if guard is None:
                return callback(done)
            with guard:
                return callback(done)
        finally:
            current.reset(token)

    return run


def is_copy(error: BaseException, failure: BaseException) -> bool:
    """Return whether an error is a failure that `clone_exception` has copied."""
    if type(error) is not type(failure) or len(error.args) != len(failure.args):
        return False
    return all(map(operator.is_, error.args, failure.args))


def of_callback(error: BaseException) -> RuntimeError:
    """Return a future's error after its callback raised: a RuntimeError, as in torch.

    The error notes where it was raised but holds no frames: they refer to the future, and the garbage collector does
    not see the objects of a future.
    """
    frames = traceback.extract_tb(error.__traceback__)
    shown = [frame for frame in frames if not is_own_file(frame.filename)] or frames
    where = "".join(traceback.format_list(shown[-2:]))
    drop_frames(error)
    if not isinstance(error, RuntimeError):
        cause, kind = error, type(error).__qualname__
        error = RuntimeError(f"Got the following error when running the callback: {kind}: {text_of(cause)}")
        error.__cause__ = cause
    error.add_note(f"in a callback of a future:\n{where}")
    return error
