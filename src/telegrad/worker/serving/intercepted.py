"""Handlers within the interceptors of their worker."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from torch.futures import Future

from telegrad.worker import process_hooks
from telegrad.worker.calls.callables import callee_of, run
from telegrad.worker.calls.future import CallFuture, is_future
from telegrad.worker.calls.headers import Headers
from telegrad.worker.calls.interceptors import (
    InterceptedCall,
    Interceptor,
    Shown,
    carrier_of,
    check_reply,
    run_chain,
    succeeded,
)
from telegrad.worker.calls.pending_work import PendingWork
from telegrad.worker.serving.deferred_results import deferred_result, mark_async

__all__ = ["Ended", "InterceptedHandler"]

Ended: TypeAlias = Callable[[object, BaseException | None], None]
"""Gets the result of a coroutine, or its exception."""


class InterceptedHandler:
    """Handler within the interceptors of its worker.

    Has the mark of `async_execution` if its result is a future that is not done.

    Args:
        chain: The interceptors.
        function: The handler.
        kind: Kind of the call, "call" or "remote".
        peer: Name of the caller.
        timeout: Seconds left; 0 is no limit.
        headers: Those of the request.
        run_coroutine: Runs a coroutine on the worker's event loop.
    """

    def __init__(
        self,
        chain: tuple[Interceptor, ...],
        function: Callable[..., object],
        kind: str,
        peer: str,
        timeout: float,
        headers: Headers,
        run_coroutine: Callable[[Coroutine[Any, Any, object], Ended], Callable[[], None]],
    ) -> None:
        self._chain = chain
        self._function = function
        self._carrier = carrier_of(function)
        self._args: tuple[object, ...] = ()  # of a carrier
        self._kind = kind
        self._peer = peer
        self._timeout = timeout
        self._headers = headers
        self._run_on_loop = run_coroutine
        self._started: list[CallFuture[Any]] = []  # results that were not done
        self._is_canceled = False

    @property
    def function(self) -> Callable[..., object]:
        """The handler."""
        return self._function

    def __call__(self, *args: object, **kwargs: object) -> object:
        carrier, kind = self._carrier, self._kind
        shown: Shown = self._function, args, kwargs
        if carrier is not None:
            kind, shown = carrier.kind, carrier.show(args, callee_of)
            self._args = args
        self._given = InterceptedCall(kind, self._peer, *shown, self._timeout, headers=self._headers)
        result = run_chain(self._chain, self._given, self._run)
        if not is_future(result):
            check_reply(carrier, self._given, result)
            return result
        if not result.done():
            if carrier is not None:
                result = self._follow(result, lambda value: check_reply(carrier, self._given, value))
            if isinstance(result, CallFuture):  # an interceptor may have started another call
                self._waits_for(result)
            mark_async(self)
            return result
        error = result.failure() if isinstance(result, CallFuture) else None
        if error is None:
            value = result.value()
            check_reply(carrier, self._given, value)
            return value
        del result  # the traceback refers to this frame
        raise error

    def cancel(self) -> None:
        """Cancel the coroutines and calls that the handler waits for, now and later."""
        self._is_canceled = True
        for future in self._started:
            future.cancel()

    def _waits_for(self, future: CallFuture[Any]) -> None:
        self._started.append(future)
        if self._is_canceled:  # checked last: `cancel` finds the future, or has set this before
            future.cancel()

    def _run(self, call: InterceptedCall, /) -> Future[Any]:
        """Run the handler; errors are those of the future, as for deferred results."""
        function: Any = call.function
        args, kwargs = call.args, call.kwargs
        if self._carrier is not None:
            function, args, kwargs = self._function, self._args, {}
        try:
            if self._carrier is not None and call is not self._given:
                args = self._carrier.change(args, call.function, call.args, call.kwargs)
            result = run(function, args, kwargs)
            deferred = deferred_result(function, result)
            if deferred is None:
                return succeeded(result)
            if isinstance(deferred, CallFuture):
                self._waits_for(deferred)
                return deferred
            return self._run_coroutine(deferred) if isinstance(deferred, Coroutine) else self._follow(deferred)
        except BaseException as e:
            if process_hooks.forked:
                raise
            trace = e.__traceback__
            future = _future_of_handler()
            future.set_exception(e.with_traceback(None if trace is None else trace.tb_next))
            return future

    def _follow(self, result: Future[Any], check: Callable[[object], None] | None = None) -> CallFuture[Any]:
        """Return a future of the same result, if it passes a check."""
        future = _future_of_handler()
        PendingWork(future, self._given.name, is_cancelable=False).follow(result, check)
        return future

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, object]) -> Future[Any]:
        future = _future_of_handler()

        def ended(value: object, error: BaseException | None) -> None:
            if error is None:
                future._succeed(value)
            else:
                future._fail(error)

        cancel = self._run_on_loop(coroutine, ended)

        def cancel_work() -> bool:
            cancel()
            return True

        future._cancel_work = cancel_work
        self._waits_for(future)
        return future


def _future_of_handler() -> CallFuture[Any]:
    return CallFuture._of(is_read=True, is_of_handler=True)  # the caller gets a failure
