"""The future of an asynchronous call: a real ``torch.futures.Future`` that drives the network while it is waited for,
can be awaited, and complains when it failed and nobody ever looked."""

import asyncio
import traceback
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch

from telegrad import _core
from telegrad.errors import NotInitialized
from telegrad.serialize.tracebacks import clone_exception, drop_frames, strip_own_frames, text_of
from telegrad.worker.calls import tracing
from telegrad.worker.scope import current
from telegrad.worker.serving.event_loop import blocking_in_loop
from telegrad.worker.unread_failures import Failure, describe_call

__all__ = ["NO_DEVICES", "CallFuture", "Deferred"]

NO_DEVICES: list[Any] = []

T = TypeVar("T")
S = TypeVar("S")

Deferred: TypeAlias = Coroutine[Any, Any, T] | torch.futures.Future[T]
"""The return type of a handler whose result comes later: an ``async def``, or one under `async_execution`."""


class CallFuture(torch.futures.Future[T]):
    """The future of a call's result. Made by ``rpc_async`` and its kin, generic in the type of the result.

    Waiting for it polls the network in the waiting thread, so the result needs no hop between threads. It is completed
    even when nobody waits; callbacks then run on a thread of the worker's pool.

    Made by `CallFuture(NO_DEVICES)`: torch's own constructor, in Python, takes longer than all the rest of it.

    Example::

        future = rpc.rpc_async("worker1", max, args=(1, 2))
        doubled = future.then(lambda done: 2 * done.value())
        print(future.wait(), doubled.wait())  # 2 4; in a coroutine: await future
    """

    __slots__ = ("_call", "_calls", "_request")  # an instance dictionary costs as much as the future
    if TYPE_CHECKING:

        def __init__(self, devices: list[Any]) -> None: ...
    else:
        __init__ = torch._C.Future.__init__
    _call: int  # once it has left: its id,
    _calls: Any  # whose it is,
    _request: Any  # and (peer, what was called or its name, time-out in ns)

    # On the class, so that a future that nothing special happens to carries little.
    _read = False  # nobody has to read it
    _failure: Failure | None = None
    _parent_calls: Any = None  # of what `then` has returned: whose pool tells of a failure
    _has_callbacks = False  # of the program's
    _span: tracing.Span | None = None  # in a profile
    _on_late_reply: Callable[[], None] | None = (
        None  # called if the reply comes after the time-out, where only Python knows
    )

    def wait(self) -> T:
        """Block until the call has ended.

        Returns:
            The result.

        Raises:
            RuntimeError: the time is over, or the worker is lost (`RpcTimeout`, `WorkerLost`).
            what the called function raised: as an exception that is of the original type and of RemoteError.
        """
        try:
            if not self.done():
                if asyncio._get_running_loop() is not None:
                    with blocking_in_loop():
                        self._drive()
                        return super().wait()
                self._drive()
            return super().wait()
        except Exception as error:
            raise strip_own_frames(error)

    def _drive(self) -> None:
        """Polls the network until the outcome is here, or the pool's."""
        call = getattr(self, "_call", 0)
        if not call:  # it is no call's, or a fault injector holds the call back
            return
        client = self._calls.client
        try:
            client.wait(self, call, 0)
        except NotInitialized:  # the worker has been closed meanwhile, and has no thread left to bring an outcome
            if not self.done():
                raise
        except BaseException:  # a signal handler's
            if not self.done():
                client.wait(self, call, 1)
            raise

    def attach(self, span: tracing.Span) -> None:
        """Have a profile's record of the call end with it.

        Args:
            span: the record.
        """
        self._span = span
        super().add_done_callback(lambda _: span.end())

    def failure(self) -> BaseException | None:
        """Return the exception that it ended with, if any. Does not count as reading it."""
        return None if self._failure is None else self._failure.error

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> "CallFuture[S]":
        """Have a callback run when the call has ended; return the future of its result.

        The callback runs in the thread that completes the call, which waits for it or is one of the worker's pool; or
        here if the call has ended already. Its own calls belong to the request, autograd context and worker that this
        is called in.

        Args:
            callback: gets this future, which is done; its ``value()`` raises if the call failed.

        Returns:
            A future that may be awaited too. A failure of the callback that the program never looks at is logged.

        Raises:
            TypeError: ``callback`` is not callable.
        """
        child: CallFuture[S] = CallFuture(NO_DEVICES)
        child._request = (-1, callback, 0)
        child._parent_calls = getattr(self, "_calls", None) or self._parent_calls
        callback = bind_scope(callback)

        def run(done: torch.futures.Future[T]) -> None:
            try:
                value = callback(done)
            except BaseException as e:
                child.set_exception(_of_callback(e))
            else:
                child.set_result(value)

        self._has_callbacks = True
        super().add_done_callback(_core.shielded(run))
        return child

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Have a callback run when the call has ended; at once if it has.

        Args:
            callback: gets this future. Where it runs: see `then`. Torch prints what it raises.
        """
        self._has_callbacks = True
        super().add_done_callback(_core.shielded(bind_scope(callback)))

    def set_exception(self, result: object) -> None:
        """Complete it with an exception, which `wait`, `value` and ``await`` raise.

        Args:
            result: the exception.

        Raises:
            TypeError: ``result`` is not an exception.
        """
        if not isinstance(result, BaseException):
            raise TypeError(f"{result} is of type {type(result)}, not an Exception.")
        failure = self._failure = self._failed(result)

        def fail(error: BaseException) -> None:
            failure.read = True  # also when collect_all or wait_all reads it, which know only torch's own class
            raise clone_exception(error)

        if self._read:  # since it was made
            failure.read = True
        super()._set_unwrap_func(fail)
        super().set_result(cast("T", result))

    def _failed(self, error: BaseException) -> Failure:
        calls = getattr(self, "_calls", None) or self._parent_calls
        return Failure(error, self._read, getattr(self, "_request", None), "read its future", calls)

    def _disregard(self) -> None:
        """A failure of it is no news: the program has given up waiting for it."""
        self._read = True
        if self._failure is not None:
            self._failure.read = True

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        waiting = loop.create_future()

        def wake(_: object) -> None:
            if not waiting.done():
                waiting.set_result(None)

        def finished(done: object) -> None:
            try:
                loop.call_soon_threadsafe(wake, done)
            except RuntimeError:  # the loop has been closed: nobody awaits this any more
                pass

        super().add_done_callback(finished)
        try:
            yield from waiting.__await__()
        except BaseException:  # the awaiting task was canceled
            self._disregard()
            raise
        try:
            return self.value()
        except StopIteration as e:  # a coroutine cannot raise it
            raise RuntimeError(f"{describe_call(getattr(self, '_request', None))} raised StopIteration") from e
        except Exception as error:
            raise strip_own_frames(error)


def bind_scope(callback: Callable[[Any], S]) -> Callable[[Any], S]:
    """The callback, as part of what runs here: its calls end with the same request, and go through the same worker,
    in whichever thread it runs.

    Raises:
        TypeError: it cannot be called; in torch's words.
    """
    if not callable(callback):
        raise TypeError(f"incompatible function arguments. A callback has to be callable, which {callback!r} is not.")
    scope = current.get()
    if scope is None:
        return callback
    if tracing.observer.on and (recording := tracing.recording.get()) is not None:
        callback = tracing.bind_recording(recording, callback)

    def run(done: Any) -> S:
        here = current.get()
        if here is scope:
            return callback(done)
        nested = scope.nested or (here is not None and here.nested)
        token = current.set(scope._replace(nested=nested, request=False))
        guard = None if scope.autograd is None else scope.worker.autograd.context_guard(scope.autograd)
        try:
            if guard is None:
                return callback(done)
            with guard:
                return callback(done)
        finally:
            current.reset(token)

    return run


def _of_callback(error: BaseException) -> RuntimeError:
    """The error, as in torch a RuntimeError, of the future that a callback was to complete. It tells where that was,
    but holds no frames: they have the future, and the garbage collector does not see what a future holds."""
    where = "".join(traceback.format_tb(error.__traceback__)[-2:])
    drop_frames(error)
    if not isinstance(error, RuntimeError):
        cause, kind = error, type(error).__qualname__
        error = RuntimeError(f"Got the following error when running the callback: {kind}: {text_of(cause)}")
        error.__cause__ = cause
    error.add_note(f"in a callback of a future:\n{where}")
    return error
