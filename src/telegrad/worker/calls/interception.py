"""Calls on their way through the interceptors of their caller."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch.futures import Future

from telegrad.errors import RpcTimeout, TelegradError
from telegrad.timeouts import nanoseconds
from telegrad.worker.autograd_hooks import AutogradContext
from telegrad.worker.calls.faults import Creation
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.interceptors import InterceptedCall, Interceptors, carrier_of, check_reply, run_chain
from telegrad.worker.calls.messages import Request
from telegrad.worker.calls.pending_work import PendingWork
from telegrad.worker.scope import current, remaining

__all__ = ["CallForm", "InterceptedRequest", "send"]


class CallForm(NamedTuple):
    """Call that the native client has resolved but cannot encode."""

    peer: int
    function: object  # with a receiver: None for its value, the name of a method, or a function of the value
    args: Any  # a tuple or list; the drop-in accepts more
    kwargs: Any
    timeout: int  # ns; 0: none
    nested: bool
    context: AutogradContext | None  # the caller's autograd context
    mode: str  # mode in a profile: sync, async or remote; empty for calls that profiles omit
    name: tuple[int, bytes] | None  # of the function; None: it travels by value
    receiver: Any  # an RRef
    introduce: bool  # the owner may not know the receiver yet
    keep_as: int | None  # the local id of the reference to create
    internal: bool


class InterceptedRequest(NamedTuple):
    """Call that the program's interceptors get before it is encoded."""

    form: CallForm
    label: object
    keep: object  # kept alive until the call ends


class Sender(Protocol):
    """`telegrad.worker.calls.client.Calls`, as this module uses it."""

    interceptors: Interceptors
    delay: Callable[[float, Callable[[], object]], None] | None

    def name_of(self, worker_id: int, /) -> str: ...
    def find_name(self, function: object, /) -> tuple[int, bytes] | None: ...
    def future_of(self, peer: int, label: object, timeout: int, /) -> CallFuture[Any]: ...
    def encode(self, call: CallForm, /) -> Request: ...
    def send(self, request: Request, target: CallFuture[Any], /) -> None: ...


def send(calls: Sender, form: CallForm, target: CallFuture[Any] | Creation) -> None:
    """Run a call through the interceptors of its worker, and complete its target.

    Args:
        calls: Calls of the sender.
        form: The call.
        target: A future, or a creation, which then creates a future.

    Raises:
        Exception: Whatever an interceptor raises, or encoding the call.
    """
    chain = _Chain(calls, form)
    if isinstance(target, CallFuture):
        chain.work = work = PendingWork(target, chain.text)
        result = chain.run()
    else:
        try:
            result = chain.run()
        except BaseException:
            if chain.sent:  # register the value, so that its owner drops it
                target._call = getattr(chain.sent[0], "_call", 0)
                PendingWork(target.delayed(scripted=False), chain.text, is_cancelable=False).follow(chain.sent[0])
            raise
        target = target.delayed(scripted=False)
        work = PendingWork(target, chain.text, is_cancelable=False)
    if not isinstance(result, Future):
        chain.check(result)
        work.succeed(result)
        return
    last = chain.last_call_of(result)
    if last is not None:
        target._source = last
    elif not result.done():
        chain.limit(work)
    work.follow(result, chain.check)


class _Chain:
    """Call within the interceptors of its worker."""

    def __init__(self, calls: Sender, form: CallForm) -> None:
        self._calls = calls
        self._form = form
        self._is_creation = form.keep_as is not None
        kind, function, args, kwargs = form.mode, form.function, form.args, form.kwargs
        self._carrier = carrier_of(function)
        if self._carrier is not None:
            kind = self._carrier.kind
            function, args, kwargs = self._carrier.show(args)
        elif function is None:
            kind = "to_here"
        self._given = InterceptedCall(
            kind, calls.name_of(form.peer), function, args, kwargs, form.timeout / 1e9, form.receiver
        )
        self._timeouts: list[int] = []  # ns, of the calls that have been sent
        self.sent: list[CallFuture[Any]] = []
        self.work: PendingWork | None = None
        self.text: str = f"{self._given.name} on {self._given.peer}"

    def run(self) -> object:
        """Run the interceptors; return a future, or the result."""
        given = self._given
        result = run_chain(self._calls.interceptors.chain, given, self._start)
        if self._is_creation and not self.sent:
            raise TelegradError(
                f"an interceptor returned from remote() of {given.name} without a call of proceed, so {given.peer} has"
                " no value to refer to. Call proceed(call), or raise an error."
            )
        return result

    def check(self, value: object) -> None:
        """Check the result that the interceptors return.

        Raises:
            TelegradError: They have replaced a result of Telegrad's own.
        """
        check_reply(self._carrier, self._given, value)

    def last_call_of(self, result: Future[Any]) -> CallFuture[Any] | None:
        """Return the call sent last if it alone completes a future, or the parent of it."""
        if not self.sent or not isinstance(result, CallFuture):
            return None
        last = self.sent[-1]
        call = getattr(last, "_call", 0)
        return last if result is last or (call and result._parent_call == call) else None

    def limit(self, work: PendingWork) -> None:
        """Complete the call with RpcTimeout at the end of its timeout.

        For results that the timeouts of calls do not limit. An interceptor may have changed the timeout.
        """
        timeouts = self._timeouts or [self._form.timeout]
        if 0 in timeouts or self._calls.delay is None:
            return
        seconds = max(timeouts) / 1e9
        text = self.text
        self._calls.delay(seconds, lambda: work.end(RpcTimeout(seconds, text, "intercepted")))

    def _start(self, call: InterceptedCall, /) -> CallFuture[Any]:
        """Send the call: the end of the chain."""
        if self._is_creation and self.sent:
            raise TelegradError(
                f"an interceptor called proceed twice for remote() of {call.name}: a value is made once"
            )
        if self.work is not None:
            self.work.require_open()
        calls = self._calls
        request = calls.encode(self._changed(call))
        future = calls.future_of(request.peer, request.label, request.timeout)
        future._read = True  # the program's future logs a failure
        calls.send(request, future)
        self.sent.append(future)
        self._timeouts.append(request.timeout)
        if self.work is not None:
            self.work.add(future.cancel)
        return future

    def _changed(self, call: InterceptedCall) -> CallForm:
        """Return the call with the changes of interceptors."""
        form, given = self._form, self._given
        if (call.kind, call.peer) != (given.kind, given.peer) or call.receiver is not given.receiver:
            raise ValueError(
                f"an interceptor changed kind, peer or receiver of the call of {given.name} on {given.peer}; it may"
                " change function, args, kwargs and timeout"
            )
        if call is given:
            return form
        if call.timeout != given.timeout:
            form = form._replace(timeout=remaining(nanoseconds(call.timeout), current.get()))
        if self._carrier is not None:
            function = call.function
            if form.receiver is None:
                name = self._calls.find_name(function)
                function = function if name is None else name[1]
            return form._replace(args=self._carrier.change(form.args, function, call.args, call.kwargs))
        if call.function is not form.function:
            form = form._replace(function=call.function, name=self._calls.find_name(call.function))
        return form._replace(args=call.args, kwargs=call.kwargs)
