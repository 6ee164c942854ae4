"""Calls on their way through the interceptors of their caller."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

from torch.futures import Future

from telegrad.errors import RpcTimeout, TelegradError
from telegrad.protocols.rref import RRefId, Ticket
from telegrad.timeouts import nanoseconds
from telegrad.worker.autograd_hooks import AutogradContext
from telegrad.worker.calls.delayed import send_later
from telegrad.worker.calls.encoded import Request
from telegrad.worker.calls.future import CallFuture, is_future
from telegrad.worker.calls.headers import SentHeaders, sent_headers
from telegrad.worker.calls.interceptors import (
    InterceptedCall,
    Interceptor,
    Interceptors,
    Proceed,
    carrier_of,
    check_reply,
    is_internal,
    of_process,
    run_chain,
    succeeded,
)
from telegrad.worker.calls.messages import Messages
from telegrad.worker.calls.pending_work import OpenWork, PendingWork
from telegrad.worker.calls.tracing import TraceContext
from telegrad.worker.closed import WorkerCalls
from telegrad.worker.scope import current, remaining

__all__ = [
    "MESSAGE",
    "CallForm",
    "InterceptedCreation",
    "InterceptedRequest",
    "ResolvedCall",
    "Sender",
    "is_intercepted",
    "send",
    "send_message",
]

MESSAGE = "message"  # kind of one-way messages


class SharedReferences(Protocol):
    """References of a worker (`telegrad.worker.refs.references.References`)."""

    def epoch_of(self, peer: int, /) -> int: ...
    def share(self, rref: RRefId, owner: int, peer: int, epoch: int, /) -> Ticket: ...


class ReferringWorker(Protocol):
    """Worker of a reference."""

    @property
    def references(self) -> SharedReferences: ...


class Receiver(Protocol):
    """Reference on whose value a call runs (`telegrad.rref.rref.RRef`)."""

    @property
    def id(self) -> RRefId: ...
    @property
    def worker(self) -> ReferringWorker: ...

    @property
    def _scripted(self) -> bool: ...

    def is_unknown(self) -> bool: ...


class CallForm(NamedTuple):
    """Call that the native client has resolved but cannot encode."""

    peer: int
    function: object  # with a receiver: None for its value, the name of a method, or a function of the value
    args: Any  # a tuple or list; the drop-in accepts more
    kwargs: Any
    timeout: int  # ns; 0: none
    depth: int  # of nested calls; 0: no handler makes the call
    context: AutogradContext | None  # the caller's autograd context
    mode: str  # mode in a profile: sync, async or remote; empty for calls that profiles omit
    name: tuple[int, bytes] | None  # of the function; None: it travels by value
    receiver: Receiver | None
    introduce: bool  # the owner may not know the receiver yet
    keep_as: int | None  # the local id of the reference to create
    internal: bool


class InterceptedRequest(NamedTuple):
    """Call that interceptors get before it is encoded."""

    form: CallForm
    label: object
    keep: object  # kept alive until the call ends


class InterceptedCreation(Protocol):
    """Call that creates a value (telegrad.rref.creation)."""

    _call: int  # id of the call, once sent

    def intercepted(self) -> CallFuture[None]: ...


class Sender(WorkerCalls, Protocol):
    """`telegrad.worker.calls.client.Calls`, as this module uses it."""

    worker_id: int
    messages: Messages
    interceptors: Interceptors
    own_interceptors: Interceptors
    open_work: OpenWork

    def name_of(self, worker_id: int, /) -> str: ...
    def find_name(self, function: object, /) -> tuple[int, bytes] | None: ...
    def name_or_function(self, function: object, /) -> object: ...
    def future_of(self, peer: int, label: object, timeout: int, /) -> CallFuture[object]: ...
    def encode(self, call: CallForm, trace: TraceContext | None, headers: SentHeaders, /) -> Request: ...
    def send(self, request: Request, target: CallFuture[object], /) -> None: ...


@dataclass(frozen=True, slots=True)
class ResolvedCall(InterceptedCall):
    """Call as the interceptors of Telegrad see it, with the changes of the program's.

    They may change the delay and the trace.

    Attributes:
        calls: calls of the sender.
        form: the call; None for a one-way message, whose kind is `MESSAGE` and whose function is the message's kind.
        trace: what the callee records for a profile.
    """

    calls: Sender = field(kw_only=True)
    form: CallForm | None = None
    trace: TraceContext | None = None


_FIELDS = tuple(each.name for each in fields(InterceptedCall))


def _of_program(calls: Sender, form: CallForm) -> tuple[Interceptor, ...]:
    """Return the interceptors of the program that see a call."""
    return calls.interceptors.chain if form.mode and not is_internal(form.function) else ()


def is_intercepted(calls: Sender, form: CallForm) -> bool:
    """Return whether there are interceptors that see a call."""
    return bool(of_process.chain or calls.own_interceptors.chain or _of_program(calls, form))


def send(calls: Sender, form: CallForm, target: CallFuture[Any] | InterceptedCreation) -> None:
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
        try:
            result = chain.run()
        except BaseException:
            target._abandon()
            raise
    else:
        try:
            result = chain.run()
        except BaseException:
            if chain.sent:  # register the value, so that its owner drops it
                target._call = chain.sent[0]._call_id()
                PendingWork(target.intercepted(), chain.text, is_cancelable=False).follow(chain.sent[0])
            raise
        target = target.intercepted()
        for sent in chain.sent:
            sent._on_late_reply = target._on_late_reply
        work = PendingWork(target, chain.text, is_cancelable=False)
    if not is_future(result):
        chain.check(result)
        work.succeed(result)
        return
    last = chain.last_call_of(result)
    if last is not None:
        target._source = last
    elif not result.done():
        chain.limit(work)
    work.follow(result, chain.check)


def send_message(calls: Sender, kind: str, peer: int, send: Callable[[], object]) -> None:
    """Run a one-way message through Telegrad's interceptors of its worker.

    Args:
        calls: Calls of the sender.
        kind: Kind of the message.
        peer: Id of the receiver.
        send: Sends the message.
    """

    def start(call: InterceptedCall) -> CallFuture[object]:
        if call.delay:
            calls.open_work.delay(call.delay, send)
        else:
            send()
        return succeeded(None)

    call = ResolvedCall(MESSAGE, calls.name_of(peer), kind, (), {}, calls=calls)
    run_chain(calls.own_interceptors.chain, call, start)


class _Chain:
    """Call within the interceptors of its worker."""

    def __init__(self, calls: Sender, form: CallForm) -> None:
        self._calls = calls
        self._form = form
        self._is_creation = form.keep_as is not None
        kind, function, args, kwargs = form.mode, form.function, form.args, form.kwargs
        self._of_program = _of_program(calls, form)
        self._carrier = carrier_of(function) if self._of_program else None
        if self._carrier is not None:
            kind = self._carrier.kind
            function, args, kwargs = self._carrier.show(args)
        elif function is None:
            kind = "to_here"
        self._given = InterceptedCall(
            kind, calls.name_of(form.peer), function, args, kwargs, form.timeout / 1e9, form.receiver
        )
        self._timeouts: list[int] = []  # ns, of the calls that have been sent
        self.sent: list[CallFuture[object]] = []
        self.work: PendingWork | None = None
        self.text: str = f"{self._given.name} on {self._given.peer}"

    def run(self) -> object:
        """Run the interceptors; return a future, or the result."""
        given = self._given
        chain = (*self._of_program, self._resolve, *of_process.chain, *self._calls.own_interceptors.chain)
        result = run_chain(chain, given, self._start)
        has_failed = isinstance(result, CallFuture) and result.failure() is not None
        if self._is_creation and not self.sent and not has_failed:
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

    def last_call_of(self, result: Future[object]) -> CallFuture[object] | None:
        """Return the call sent last if it alone completes a future, or the parent of it."""
        if not self.sent or not isinstance(result, CallFuture):
            return None
        last = self.sent[-1]
        call = last._call_id()
        return last if result is last or (call and result._parent_call == call) else None

    def limit(self, work: PendingWork) -> None:
        """End the call at its timeout with RpcTimeout, or when the worker closes.

        For results that the timeouts of calls do not limit. An interceptor may have changed the timeout.
        """
        open_work = self._calls.open_work
        open_work.add(work)
        timeouts = self._timeouts or [self._form.timeout]
        if 0 in timeouts:
            return
        seconds = max(timeouts) / 1e9
        remedy = "Complete the future that the interceptor returned, or return that of `proceed`."
        late = RpcTimeout(seconds, self.text, "intercepted", remedy)
        open_work.run_later(seconds, work.end, late)

    def _resolve(self, call: InterceptedCall, proceed: Proceed, /) -> object:
        """Apply the changes of the program's interceptors; Telegrad's interceptors follow."""
        form = self._changed(call)
        values = {name: getattr(call, name) for name in _FIELDS}
        return proceed(ResolvedCall(**values, calls=self._calls, form=form))

    def _start(self, call: InterceptedCall, /) -> CallFuture[object]:
        """Encode and send the call: the end of the chain."""
        if self._is_creation and self.sent:
            raise TelegradError(
                f"an interceptor called proceed twice for remote() of {call.name}: a value is made once"
            )
        if self.work is not None:
            self.work.require_open()
        assert isinstance(call, ResolvedCall)
        assert call.form is not None
        calls = self._calls
        request = calls.encode(call.form, call.trace, sent_headers(call.headers, self.text))
        future = calls.future_of(request.peer, request.label, request.timeout)
        future._mark_read()  # the program's future logs a failure
        if call.delay > 0:
            send_later(calls, calls.open_work, request, future, call.delay)
        else:
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
                " change function, args, kwargs, timeout and headers"
            )
        if call is given:
            return form
        if call.timeout != given.timeout:
            seconds = 1e-9 if call.timeout < 0 else call.timeout  # the interceptor has used up the time
            form = form._replace(timeout=remaining(nanoseconds(seconds), current.get()))
        if self._carrier is not None:
            function = call.function if form.receiver is not None else self._calls.name_or_function(call.function)
            return form._replace(args=self._carrier.change(form.args, function, call.args, call.kwargs))
        if call.function is not form.function:
            form = form._replace(function=call.function, name=self._calls.find_name(call.function))
        return form._replace(args=call.args, kwargs=call.kwargs)
