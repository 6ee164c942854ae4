"""Future of an asynchronous call.

The future is a ``torch.futures.Future`` that polls the network while a thread waits for it. Coroutines can await it. If
it fails and the program never retrieves the error, the log has a line.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeGuard, TypeVar, cast

import torch

from telegrad import _core
from telegrad.errors import Cancelled, NotInitialized, RemoteError
from telegrad.serialize.tracebacks import clone_exception, strip_own_frames
from telegrad.worker.blocking import check_blocking
from telegrad.worker.calls.callbacks import bind_scope, is_copy, of_callback
from telegrad.worker.calls.future_waits import wait_done, wait_in_loop
from telegrad.worker.closed import ClosedEngine, WorkerCalls
from telegrad.worker.unread_failures import CallSummary, Failure, describe_call

__all__ = ["CallFuture", "Deferred", "cancel_if_interrupted", "is_future"]

logger: logging.Logger = logging.getLogger("telegrad")

T = TypeVar("T")
S = TypeVar("S")

Deferred: TypeAlias = Coroutine[Any, Any, T] | torch.futures.Future[T]
"""Return type of a handler with a deferred result: an ``async def``, or a function under `async_execution`."""


class CallFuture(torch.futures.Future[T]):
    """Future of a call's result, generic in the type of the result.

    ``rpc_async`` and related functions create it. Waiting for it polls the network in the waiting thread, which saves a
    thread switch. It completes even if no thread waits; then callbacks run on a pool thread of the worker.

    Example::

        future = rpc.rpc_async("worker1", max, args=(1, 2))
        doubled = future.then(lambda done: 2 * done.value())
        print(future.wait(), doubled.wait())  # 2 4; in a coroutine: await future
    """

    __slots__ = ("_call", "_calls", "_request")  # an instance dictionary costs as much as the future
    if TYPE_CHECKING:

        def __init__(self, devices: list[object]) -> None: ...
    else:
        __init__ = torch._C.Future.__init__  # torch's own Python constructor costs more than the rest of a future
    _call: int  # id of the call, once sent
    _calls: WorkerCalls
    _request: CallSummary

    # Defaults on the class keep the futures of ordinary calls small.
    _read = False  # the failure needs no log line
    _failure: Failure | None = None
    _parent_calls: WorkerCalls | None = None  # of a future that `then` returned: Calls of the pool that logs a failure
    _has_callbacks = False  # callbacks of the program
    _parent_call = 0  # of a future that `then` returned: the call at the start of the chain, for `cancel`
    _cancel_work: Callable[[], bool] | None = None  # of a future, and of its children, whose work is not one call
    _work: object = None  # this work, if it cannot be canceled
    _source: "CallFuture[Any] | None" = None  # the call that completes the future, for a thread that waits
    _is_of_handler = False  # the child of `then` passes on the failure, with its type
    _on_late_reply: Callable[[], None] | None = None  # for a reply after the timeout that only Python enforces
    _has_parent = False  # `then` returned the future
    _is_set = False  # by the program: the call completes it no more

    @classmethod
    def _of(
        cls,
        calls: WorkerCalls | None = None,
        request: CallSummary | None = None,
        *,
        is_read: bool = False,
        is_of_handler: bool = False,
    ) -> Self:
        """Return a pending future that Telegrad completes.

        Args:
            calls: Calls of the worker that logs a failure.
            request: The call, for errors and log lines.
            is_read: A failure needs no log line, because other code gets it.
            is_of_handler: The future has the result of a handler: its `then` passes on the failure, with its type.
        """
        future = cls([])
        if calls is not None:
            future._calls = calls
        if request is not None:
            future._request = request
        if is_read:
            future._read = True
        if is_of_handler:
            future._is_of_handler = True
        return future

    def wait(self) -> T:
        """Block until the call has ended.

        Returns:
            The result.

        Raises:
            RuntimeError: The timeout has expired, the worker is lost, or the call was canceled (`RpcTimeout`,
                `WorkerLost`, `Cancelled`).
            Exception: Any exception of the called function, as an instance of both its type and RemoteError.
        """
        try:
            if not self.done():
                if asyncio._get_running_loop() is not None:
                    check_blocking("wait() of a future", "`await future`")
                self._drive()
            return super().wait()
        except Exception as error:
            raise strip_own_frames(error)

    def _drive(self) -> None:
        """Poll the network until the completion arrives here or in the pool."""
        call = self._call_id()
        if not call:  # not the future of a call, or an interceptor delays the call
            self._require_parent()
            if self._source is not None:
                self._source._drive()
            wait_done(self)
            return
        client = self._calls.client
        try:
            if not client.wait(self, call, 0):  # another thread waits for the call
                wait_done(self)
        except NotInitialized:  # the worker has closed, so no thread delivers a completion
            if not self.done():
                raise
        except BaseException:  # raised by a signal handler
            if not self.done():
                client.wait(self, call, 1)
            raise

    def cancel(self) -> bool:
        """Cancel the call, if it has not ended.

        The future raises `telegrad.errors.Cancelled` from now on, in every thread that waits for it. A request that has
        not been sent, or is queued at the callee, never runs. An ``async def`` function gets an
        ``asyncio.CancelledError``; any other function can ask with `telegrad.rpc.cancelled`. The future of `then`
        cancels the call at the start of its chain. Any thread may call this, again and again.

        Returns:
            False if the call has already ended, been canceled, or exceeded its timeout: then nothing changes.

        Example::

            future = rpc.rpc_async("worker1", time.sleep, args=(0.2,))
            print(future.cancel(), future.cancel())  # True False
        """
        if self.done():
            return False
        return self._cancel()

    def _cancel(self) -> bool:
        if self._cancel_work is not None:
            return self._cancel_work()
        calls = self._logging_calls()
        call = self._call_id() or self._parent_call
        return bool(call) and calls is not None and calls.client.cancel(call)

    def cancelled(self) -> bool:
        """Return whether the call has been canceled.

        Example::

            future = rpc.rpc_async("worker1", time.sleep, args=(0.2,))
            future.cancel()
            print(future.cancelled())  # True
        """
        return _is_cancellation(self.failure())

    def failure(self) -> BaseException | None:
        """Return the exception of a failed call, if any; does not count as retrieving it."""
        return None if self._failure is None else self._failure.error

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> "CallFuture[S]":
        """Run a callback when the call has ended; return the future of its result.

        The callback runs in the thread that completes the call: a waiting thread, or a pool thread of the worker. If
        the call has already ended, the callback runs in the calling thread. Calls that the callback makes belong to the
        request, autograd context and worker of this caller.

        Args:
            callback: Gets this future, which is done; its ``value()`` raises if the call failed.

        Returns:
            A future that may be awaited too. If the callback fails and the program never retrieves the error, the log
            has a line.

        Raises:
            TypeError: ``callback`` is not callable.
        """
        child: CallFuture[S] = CallFuture([])
        child._request = (-1, callback, 0)
        child._has_parent = True
        child._parent_calls = self._logging_calls()
        child._parent_call = self._call_id() or self._parent_call
        child._cancel_work = self._cancel_work
        child._is_of_handler = self._is_of_handler
        callback = bind_scope(callback)

        def run(done: torch.futures.Future[T]) -> None:
            try:
                value = callback(done)
            except BaseException as e:
                failure = self.failure() if self._is_of_handler else None
                if failure is None or not is_copy(e, failure):
                    failure = of_callback(e)
                else:
                    failure.__dict__.update(e.__dict__)  # what the callback has added
                child._fail(failure)
            else:
                child._succeed(value)

        self._has_callbacks = True
        super().add_done_callback(_core.shielded(run))
        return child

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Run a callback when the call has ended, or now if it has.

        Args:
            callback: Gets this future. See `then` for its thread. Exceptions of the callback are logged.
        """
        bound, request = bind_scope(callback), getattr(self, "_request", None)

        def run(done: torch.futures.Future[T]) -> None:
            try:
                bound(done)
            except Exception:
                logger.exception("a callback of the future of %s raised", describe_call(request))

        self._has_callbacks = True
        super().add_done_callback(_core.shielded(run))

    def _on_done(self, callback: Callable[[Any], object]) -> None:
        """Run a function of Telegrad when the call has ended, in no scope of the caller."""
        torch._C.Future.add_done_callback(self, _core.shielded(callback))

    def set_result(self, result: T) -> None:
        """Complete the future with a value of the program.

        Every thread and coroutine that waits gets the value. The call is canceled, as by `cancel`, if it has not ended;
        if `then` returned the future, the call at the start of its chain goes on.

        Args:
            result: The value.

        Raises:
            RuntimeError: The future is done.
        """
        try:
            self._detach()
        finally:
            super().set_result(result)

    def set_exception(self, result: object) -> None:
        """Complete the future with an exception of the program.

        `wait`, `value` and ``await`` raise it. The call is canceled, as by `set_result`.

        Args:
            result: The exception.

        Raises:
            TypeError: ``result`` is not an exception.
            RuntimeError: The future is done.
        """
        if not isinstance(result, BaseException):
            raise TypeError(f"{result} is of type {type(result)}, not an Exception.")
        try:
            self._detach()
        finally:
            self._set_failure(result)

    def _detach(self) -> None:
        """Cancel the future's own call: the program completes the future."""
        if self.done():
            return
        self._is_set = True
        if not self._has_parent:
            self._cancel()

    def _succeed(self, value: T) -> None:
        """Complete the future with the value of its work, if the program has not."""
        try:
            torch._C.Future.set_result(self, value)
        except RuntimeError:
            if not self._is_set:
                raise

    def _fail(self, error: BaseException) -> None:
        """Complete the future with the error of its work, if the program has not."""
        if not self._is_set:
            self._set_failure(error)

    def _set_failure(self, result: BaseException) -> None:
        if self.done():
            torch._C.Future.set_result(self, cast("T", result))  # raises torch's error; the failure stays
        failure = self._failure = self._failed(result)

        def fail(error: BaseException) -> None:
            failure.read = True  # also for collect_all and wait_all, which know only torch's class
            raise clone_exception(error)

        if self._read:  # set before the failure
            failure.read = True
        super()._set_unwrap_func(fail)
        torch._C.Future.set_result(self, cast("T", result))

    def _failed(self, error: BaseException) -> Failure:
        calls = self._logging_calls()
        read = self._read or _is_cancellation(error)  # the program knows
        return Failure(error, read, getattr(self, "_request", None), "read its future", calls)

    def _logging_calls(self) -> WorkerCalls | None:
        """Return the Calls of the worker that logs a failure, if there is one."""
        return getattr(self, "_calls", None) or self._parent_calls

    def _set_sent(self, call: int) -> None:
        """Set the id of the call, which has been sent."""
        self._call = call

    def _call_id(self) -> int:
        """Return the id of the call; 0 if none has been sent."""
        return getattr(self, "_call", 0)

    def _polled(self) -> "CallFuture[Any]":
        """Return the future to poll for: this one, or that of the call which completes it."""
        return self._source or self

    def _report_late_reply(self) -> None:
        """Report that a value has arrived after the future has failed."""
        if self._on_late_reply is not None:
            self._on_late_reply()

    def _set_request(self, request: CallSummary) -> None:
        """Set what errors and log lines say about the call."""
        self._request = request

    def _mark_read(self) -> None:
        """Mark a failure as read: it needs no log line, now or later."""
        self._read = True
        if self._failure is not None:
            self._failure.read = True

    def _abandon(self) -> None:
        """Cancel the call: a signal handler has raised before the program got the future."""
        self._mark_read()
        self.cancel()

    def _require_parent(self) -> None:
        """Raise NotInitialized in a forked child: no thread completes the call."""
        calls = self._logging_calls()
        client = None if calls is None else calls.client
        if isinstance(client, ClosedEngine) and client.is_inherited:
            client.wait()

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            self._require_parent()
        try:
            yield from wait_in_loop(self)
        except BaseException:  # the awaiting task was canceled
            self._mark_read()
            self.cancel()
            raise
        try:
            return self.value()
        except StopIteration as e:  # a coroutine cannot raise StopIteration
            raise RuntimeError(f"{describe_call(getattr(self, '_request', None))} raised StopIteration") from e
        except Exception as error:
            raise strip_own_frames(error)


def is_future(value: object) -> TypeGuard[torch.futures.Future[Any]]:
    """Return whether a value is a future.

    ``then`` and ``collect_all`` of torch return futures of its base class.
    """
    return isinstance(value, torch._C.Future)


def _is_cancellation(error: BaseException | None) -> bool:
    """Return whether the program has canceled the call.

    Its function may have raised Cancelled as well.
    """
    return isinstance(error, Cancelled) and not isinstance(error, RemoteError)


@contextmanager
def cancel_if_interrupted(future: CallFuture[Any]) -> Iterator[None]:
    """Cancel the call if this block, which starts and awaits it, ends early."""
    future._mark_read()  # the caller gets a failure
    try:
        yield
    finally:
        if not future.done():
            future.cancel()
