"""The calling side: what leaves, what comes back, and how long to wait for it."""

from asyncio import _get_running_loop
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from telegrad import _core
from telegrad.errors import NotInitialized, RpcTimeout, TelegradError, WorkerLost
from telegrad.protocols.rref import RRefId, Ticket
from telegrad.serialize.exceptions import unpack_exception
from telegrad.serialize.names import BY_VALUE, NameTable, NotByName
from telegrad.serialize.tracebacks import is_interrupt
from telegrad.types import WorkerInfo
from telegrad.wire import Flag, Status, Tag
from telegrad.worker import faults, profiling
from telegrad.worker.callables import is_scripted, name_of
from telegrad.worker.coroutines import holding_up
from telegrad.worker.ended import AnyEngine, AnyPlainCalls
from telegrad.worker.future import NO_DEVICES, CallFuture
from telegrad.worker.left_out import error_of, too_large
from telegrad.worker.messages import NO_PREAMBLE, Encoded, Messages
from telegrad.worker.scope import caller_flags, caller_state, current, remaining
from telegrad.worker.timeouts import nanoseconds
from telegrad.worker.uses import NOT_MADE, goes_short

__all__ = ["NOT_PLAIN_REPLY", "Calls", "Request", "complete", "sent"]

_CALL = int(Tag.CALL)
_CREATES = (int(Tag.CREATE), int(Tag.CREATE_METHOD))
_VALUE, _ERROR, _CREATED = int(Tag.VALUE), int(Tag.ERROR), int(Tag.CREATED)
_REPLIED = int(Status.REPLIED)
_PREAMBLE, _INTERNAL = int(Flag.PREAMBLE), int(Flag.INTERNAL)
_LEFT_OUT = int(Flag.LEFT_OUT)
NOT_PLAIN_REPLY = int(Flag.PREAMBLE | Flag.BODY | Flag.LEFT_OUT)
_NO_NAME = (0, None)
_PARTS = ("args", "kwargs")
_PARTS_BY_VALUE = ("the function", *_PARTS)


# torch.futures.Future's own only calls it.
complete: Callable[[torch.futures.Future[Any], Any], None] = torch._C.Future.set_result
is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
Unusual = _core.Unusual
_PEER = 5  # of an outcome


class Request(NamedTuple):
    """A request ready to leave."""

    peer: int
    tag: int
    name: tuple[int, bytes | None]
    message: Encoded
    timeout: int  # ns; 0: none
    nested: bool
    keep: Any  # kept alive until the reply is here
    what: str  # for errors: "f on worker1"
    scripted: bool
    span: profiling.Span | None = None  # of it in a profile


class Sent(NamedTuple):
    """What is remembered of a request that has left (not its arguments, which may be large)."""

    peer: int
    what: str
    timeout: int


def sent(request: tuple[int, Any, int]) -> Sent:
    """What a future remembers of its call, told: it keeps the function, and makes its name only for an error."""
    peer, what, timeout = request
    return Sent(peer, what if isinstance(what, str) else name_of(what), timeout)


class Calls:
    """Makes the calls of one worker.

    Args:
        engine: the native engine; the worker puts another object in its place when it closes.
        messages: writes and reads messages.
        name_of: a worker's name by its id.
        me: the id of the worker itself.
        infos: the workers by name and by id; the worker changes it.
        default_timeout: seconds; 0: none.
    """

    custom_pickler: Any = None  # a pickler of the program's own, for the whole process as in torch, and what it pickles

    def __init__(
        self,
        engine: AnyEngine,
        messages: Messages,
        name_of: Callable[[int], str],
        me: int,
        infos: dict[str | int, WorkerInfo],
        default_timeout: float,
    ) -> None:
        self.engine = engine
        self.messages = messages
        self.name_of = name_of
        self.me = me
        self.default_timeout: int = nanoseconds(default_timeout)  # the program may change it
        self.names: NameTable = NameTable()
        self.plain: AnyPlainCalls = _core.PlainCalls(
            engine=engine,
            codec=messages.serializer.codec,
            recorder=messages.recorder,
            call=_CALL,
            value=_VALUE,
            make=int(Tag.MAKE),
            gradients=int(Tag.GRADIENTS),
            ended=int(Tag.CONTEXT_ENDED),
            may_linger=int(Flag.MAY_LINGER),
            reply_flags=NOT_PLAIN_REPLY,
            preamble=_PREAMBLE,
            current=current,
            infos=infos,
            info_type=WorkerInfo,
            known=self.names.known,
            by_value=BY_VALUE,
            profiling=vars(profiling),
            is_grad_enabled=is_grad_enabled,
            running_loop=_get_running_loop,
            future_type=CallFuture,
            no_devices=NO_DEVICES,
        )
        self.send_filter: faults.Filter | None = None
        self.delay: Callable[[float, Callable[[], object]], None] | None = None

    # ---- writing

    def timeout(self, seconds: float) -> int:
        """A time-out as given to the API, in ns: -1 is the default, 0 none, another negative one has passed."""
        if seconds == -1:
            return self.default_timeout
        return nanoseconds(seconds)

    def function_call(
        self,
        peer: int,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: int,
        *,
        tag: int = _CALL,
        flags: int = 0,
        target: RRefId | None = None,
        mode: str = "",
    ) -> Request:
        """The request to run a function on a peer.

        Args:
            mode: how a profile calls it: sync, async or remote; empty for what no profile shows.
        """
        span = profiling.observer.begin(self, peer, mode, function) if mode and profiling.observer.on else None
        scope = current.get()
        nested = scope is not None and scope.nested
        if scope is not None:
            timeout = remaining(timeout, scope)
        what = name_of(function)  # before anything is counted: it may be a __repr__ of the program's, which raises
        custom = self.custom_pickler
        if custom is not None:
            name: tuple[int, bytes | None] = _NO_NAME
            body: Any = custom[1](function, args, kwargs)
            pickler = custom[0]
        else:
            pickler = None
            try:
                name = self.names.find(function)
                body = (args, kwargs)
            except NotByName:
                name = _NO_NAME
                body = (function, args, kwargs)
        parts = _PARTS if len(body) == 2 else _PARTS_BY_VALUE
        context = None if scope is None or flags & _INTERNAL else scope.autograd
        message = self.messages.encode(
            peer, body, target, caller_state(), None, pickler, parts, context, context is not None, span
        )
        flags |= message.flags | caller_flags()
        return Request(
            peer, tag, name, message._replace(flags=flags), timeout, nested, None,
            what, is_scripted(function) if self.send_filter else False, span,
        )  # fmt: skip

    def about(
        self,
        peer: int,
        tag: Tag,
        target: RRefId,
        ticket: Ticket | None,
        timeout: int,
        keep: Any,
        what: str,
        *,
        method: str = "",
        body: Any = None,
        flags: int = 0,
        scripted: bool = False,
        mode: str = "",
    ) -> Request:
        """A request about a reference, to its owner: its value, its type, or a method of it.

        Args:
            ticket: carries the reference if its owner may not know it yet.
            keep: the reference itself otherwise, kept until the reply so that the owner keeps the value.
            mode: as of `function_call`, and to_here.
        """
        span = profiling.observer.begin(self, peer, mode, method or what) if mode and profiling.observer.on else None
        scope = current.get()
        nested = scope is not None and scope.nested
        context = None if scope is None or flags & _INTERNAL else scope.autograd
        message = self.messages.encode(
            peer, body, target, caller_state(), ticket, None, _PARTS, context, context is not None, span
        )
        flags |= message.flags | caller_flags()
        name: tuple[int, bytes | None] = self.names.method(method) if method else _NO_NAME
        return Request(
            peer, int(tag), name, message._replace(flags=flags), remaining(timeout, scope), nested, keep, what,
            scripted, span,
        )  # fmt: skip

    # ---- the short way, for calls that carry nothing but plain values

    def call_directly(self, to: Any, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function on a worker, given as a program does, with the default time-out; its value. `NOT_MADE`
        where that takes more than a look."""
        if self.send_filter is not None or self.custom_pickler is not None:
            return NOT_MADE
        timeout = self.default_timeout
        value = self.plain.call_directly(to, function, args, kwargs, timeout)
        if type(value) is not Unusual:
            return value
        if value.outcome is None:
            return NOT_MADE
        outcome = cast("tuple[Any, ...]", value.outcome)
        return self.result(outcome, Sent(outcome[_PEER], name_of(function), timeout))

    def start_directly(self, to: Any, function: Any, args: Any, kwargs: Any) -> CallFuture[Any] | None:
        """As `call_directly`; the future, or None."""
        if self.send_filter is not None or self.custom_pickler is not None:
            return None
        return cast(
            "CallFuture[Any] | None", self.plain.start_directly(self, to, function, args, kwargs, self.default_timeout)
        )

    def call(self, peer: int, function: Any, args: Any, kwargs: Any, timeout: int, what: str = "") -> Any:
        """Runs a function on a peer and waits for its value. For a use of a reference (telegrad.worker.uses) errors
        say `what`, and `NOT_MADE` is returned where it may not go the way of all calls."""
        scope = current.get()
        nested = False
        context = None
        if scope is not None:
            nested = scope.nested
            timeout = remaining(timeout, scope)
            context = scope.autograd
            if _get_running_loop() is not None:
                return self._call_at_length(peer, function, args, kwargs, timeout, what)
        if self.send_filter is None and self.custom_pickler is None and not profiling.unusual():
            try:
                number, text = self.names.find(function)
            except NotByName:
                pass
            else:
                flags = 0 if is_grad_enabled() else caller_flags()
                if flags and context is not None:
                    return self._call_at_length(peer, function, args, kwargs, timeout, what)
                value = self.plain.call(peer, flags, number, text, args, kwargs, timeout, nested, context)
                if type(value) is not Unusual:
                    return value
                if value.outcome is not None:
                    asked = Sent(peer, what or name_of(function), timeout)
                    return self.result(cast("tuple[Any, ...]", value.outcome), asked)
        return self._call_at_length(peer, function, args, kwargs, timeout, what)

    def _call_at_length(self, peer: int, function: Any, args: Any, kwargs: Any, timeout: int, what: str) -> Any:
        if what and not goes_short(self):
            return NOT_MADE
        r = self.function_call(peer, function, args, kwargs, timeout, mode="sync")
        return self.sync(r._replace(what=what) if what else r)

    def call_async(self, peer: int, function: Any, args: Any, kwargs: Any, timeout: int) -> CallFuture[Any]:
        """Runs a function on a peer; the future of its value."""
        scope = current.get()
        nested = False
        context = None
        if scope is not None:
            nested = scope.nested
            timeout = remaining(timeout, scope)
            context = scope.autograd
        future: CallFuture[Any] = CallFuture(NO_DEVICES)
        if (
            (context is None or is_grad_enabled())
            and self.send_filter is None
            and self.custom_pickler is None
            and not profiling.unusual()
        ):
            try:
                number, text = self.names.find(function)
            except NotByName:
                pass
            else:
                flags = 0 if is_grad_enabled() else caller_flags()
                future._calls = self
                future._request = (peer, function, timeout)
                future._call = self.plain.start(
                    peer, flags, number, text, args, kwargs, timeout, nested, _get_running_loop() is not None, future,
                    context,
                )  # fmt: skip
                if future._call:
                    return future
        return self.start(self.function_call(peer, function, args, kwargs, timeout, mode="async"), future)

    # ---- sending

    def sync(self, r: Request) -> Any:
        """Sends and waits for the value.

        Raises:
            RpcTimeout, WorkerLost, MessageTooLarge, RemoteError: what became of the call instead.
        """
        if r.span is not None:
            try:
                return self.sync(r._replace(span=None))
            finally:
                r.span.end()
        if self.send_filter is not None:
            return self.start(r).wait()
        if _get_running_loop() is not None:
            with holding_up():
                return self._sync(r)
        return self._sync(r)

    def _sync(self, r: Request) -> Any:
        message = r.message
        number, text = r.name
        outcome = self.engine.call(
            r.peer, r.tag, message.flags, number, text, message.body, message.segments, r.timeout, r.nested, r.keep
        )
        return self.result(outcome, r)

    def start(self, r: Request, future: CallFuture[Any] | None = None) -> CallFuture[Any]:
        """Sends and returns the future of the value."""
        if future is None:
            future = CallFuture(NO_DEVICES)
        span = r.span
        if span is not None:
            future._span = span
            torch.futures.Future.add_done_callback(future, lambda _: span.end())
        if self.send_filter is not None:
            faults.start(self, r, future)
        else:
            self.send(r, future)
        return future

    def send(self, r: Request, future: Any) -> None:
        """Sends; what comes of it goes to the future, or whatever the pool is to call with the outcome."""
        message = r.message
        number, text = r.name
        future._calls = self
        future._request = (r.peer, r.what, r.timeout)
        future._call = self.engine.start(
            r.peer, r.tag, message.flags, number, text, message.body, message.segments, r.timeout, r.nested,
            _get_running_loop() is not None, r.tag in _CREATES, future, r.keep,
        )  # fmt: skip
        if not future._call:
            raise NotInitialized

    def filtered(self, kind: str, scripted: bool, peer: int, send: Callable[[], object]) -> None:
        """Sends a one-way message, past a fault injector if there is one."""
        if self.send_filter is None:
            send()
        else:
            faults.send(self, kind, scripted, peer, send)

    # ---- what comes back

    def finish(self, future: CallFuture[Any], outcome: tuple[Any, ...]) -> None:
        """Completes a future with what became of its call."""
        try:
            value = self.result(outcome, sent(future._request))
        except BaseException as e:
            if future._span is not None:
                future._span.end()
            self.fail(future, e)
        else:
            if future._span is not None:
                future._span.end()  # before whoever waits goes on
            complete(future, value)

    @staticmethod
    def fail(future: CallFuture[Any], error: BaseException) -> None:
        """Completes a future whose value could not be read."""
        future.set_exception(error.with_traceback(None))  # its frames have the future
        if is_interrupt(error):  # the future had to end first
            raise error

    def result(self, outcome: tuple[Any, ...], r: Request | Sent) -> Any:
        """The value that a call's outcome holds, or the exception."""
        status, tag, flags, body, segments, _, why = outcome
        if status == _REPLIED:
            messages = self.messages
            preamble = messages.preamble(r.peer, flags, segments) if flags & _PREAMBLE else NO_PREAMBLE
            if preamble.profile is not None:
                profiling.observer.arrived(preamble.profile)
            if flags & _LEFT_OUT:
                call = self.name_of_request(r)
                raise error_of(body, f"the result of {call}" if tag == _VALUE else call)
            if tag == _VALUE:
                return messages.decode(flags, body, segments, preamble.handles, preamble.wrap)
            if tag == _ERROR:
                raise unpack_exception(body)
            if tag == _CREATED:
                return None
            raise TelegradError(
                f"{self.name_of(r.peer)} answered {self.name_of_request(r)} with a message of unknown tag {tag}"
            )
        if status == Status.TIMED_OUT:
            raise RpcTimeout(r.timeout / 1e9, self.name_of_request(r))
        if status == Status.STOPPED:
            raise NotInitialized(
                f"{NotInitialized.CALL} ({self.name_of_request(r)} was under way when this worker shut down.)"
            )
        if status == Status.TOO_LARGE:
            raise too_large(self.name_of_request(r), why)
        raise WorkerLost(self.name_of(r.peer), why or "no connection")

    def name_of_request(self, r: Request | Sent) -> str:
        """For errors."""
        return f"{r.what} on {self.name_of(r.peer)}"
