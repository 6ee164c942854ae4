"""The caller's slow path: calls that the native client leaves to Python.

The client resolves, encodes, sends and completes a call. If the codec cannot encode or decode a message, the client
(csrc/python/client.cc) calls `Calls.encode_slow` or `Calls.result`.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from telegrad import _core
from telegrad.errors import (
    Cancelled,
    MessageTooLarge,
    NotInitialized,
    Overloaded,
    ReceiverOutOfMemory,
    RpcTimeout,
    SerializationError,
    TelegradError,
    WorkerLost,
)
from telegrad.protocols.rref import RRefId
from telegrad.serialize.exceptions import unpack_exception
from telegrad.serialize.function_names import NameTable, NotByName
from telegrad.serialize.program_pickler import BodyPickler
from telegrad.serialize.tensor_layout import Body, Buffer
from telegrad.serialize.tracebacks import clone_exception, is_interrupt
from telegrad.timeouts import nanoseconds
from telegrad.types import WorkerInfo
from telegrad.wire import CallStateText, LeftOut, Status
from telegrad.wire.ints import (
    FLAG_INTERNAL,
    FLAG_LEFT_OUT,
    FLAG_METADATA,
    STATUS_REPLIED,
    TAG_CREATED,
    TAG_ERROR,
    TAG_VALUE,
)
from telegrad.worker.calls import interception, tracing
from telegrad.worker.calls.callables import name_of
from telegrad.worker.calls.encoded import NO_METADATA, Encoded, MessageSpec, Request
from telegrad.worker.calls.future import CallFuture, cancel_if_interrupted
from telegrad.worker.calls.headers import SentHeaders
from telegrad.worker.calls.interception import CallForm, InterceptedCreation, InterceptedRequest
from telegrad.worker.calls.interceptors import PICKLER, Interceptors, active, carrier_of, is_own, rename_path, switch
from telegrad.worker.calls.messages import Messages
from telegrad.worker.calls.pending_work import OpenWork
from telegrad.worker.calls.request_parts import body_of, flags_of, label_of, ticket_for
from telegrad.worker.closed import AnyClient, AnyEngine
from telegrad.worker.scope import caller_flags, caller_state
from telegrad.worker.unread_failures import CallSummary

__all__ = ["CallForm", "Calls", "Completion", "complete", "error_of", "not_sent", "too_large"]


# torch.futures.Future.set_result only calls this.
complete: Callable[[torch.futures.Future[Any], object], None] = torch._C.Future.set_result

Completion: TypeAlias = tuple[int, int, int, Body, list[Buffer], int, int, str, int]
"""Completion of a call, with the fields of `telegrad.wire.CompletionField`."""


class Calls:
    """Calls of one worker.

    Args:
        engine: The native engine; the worker replaces it when it closes.
        messages: Encodes and decodes messages.
        resolve_worker: Returns a worker by name, id or info, or raises.
        name_of: Returns a worker's name by its id.
        lost_incarnation: Returns the incarnation that a worker's loss is about, by the id and the reason.
        worker_id: Id of this worker.
        infos: Workers by name and by id; the worker updates it.
        default_timeout: Timeout in seconds; 0 for none.
        environment: Python objects that the native client uses.
    """

    def __init__(
        self,
        engine: AnyEngine,
        messages: Messages,
        resolve_worker: Callable[[object], WorkerInfo],
        name_of: Callable[[int], str],
        lost_incarnation: Callable[[int, str], int],
        worker_id: int,
        infos: dict[str | int, WorkerInfo],
        default_timeout: float,
        environment: object,
    ) -> None:
        self.engine = engine
        self.messages = messages
        self.name_of = name_of
        self._lost_incarnation = lost_incarnation
        self.worker_id = worker_id
        self.peers: dict[str | int, WorkerInfo] = infos
        self.default_timeout: int = nanoseconds(default_timeout)  # the program may change it
        self.names: NameTable = NameTable()
        self.set_result: Callable[[torch.futures.Future[Any], object], None] = complete
        self.open_work: OpenWork  # the worker sets it
        self.fenced: str = ""  # why the group has gone on without the worker
        self.interceptors: Interceptors = Interceptors(self._on_change)  # of the program
        self.own_interceptors: Interceptors = Interceptors(self._on_change)  # of Telegrad
        self._resolve_worker = resolve_worker
        self.client: AnyClient = _core.Client(engine, messages.serializer.codec, messages.hooks, self, environment)

    def _on_change(self) -> None:
        switch(("interceptors", id(self)), (*self.interceptors.chain, *self.own_interceptors.chain) or None)

    def use_pickler(self, pickler: BodyPickler | None) -> None:
        """Encode arguments and results of this worker's calls with the program's pickler.

        Args:
            pickler: The pickler; None for Telegrad's own.
        """
        self.messages.use_pickler(pickler)
        switch((PICKLER, id(self)), pickler)

    def timeout(self, seconds: float) -> int:
        """Convert a timeout of the API to ns.

        Args:
            seconds: -1 for the default, 0 for none.

        Raises:
            TypeError, ValueError: As `nanoseconds`.
        """
        if seconds == -1:
            return self.default_timeout
        return nanoseconds(seconds)

    # ---- called by the native client

    def find_peer(self, to: object) -> int:
        """Return the id of a worker that the client does not find in its table.

        Raises:
            ValueError, UnknownWorker: There is no such worker.
        """
        return self._resolve_worker(to).id

    def find_name(self, function: object) -> tuple[int, bytes] | None:
        """Return number and text of a function's or method's name; None if it has none."""
        if isinstance(function, str):
            return self.names.method(function)
        try:
            return self.names.find(function)
        except NotByName:
            return None

    def name_or_function(self, function: object) -> object:
        """Return a function's name for `callables.callee_of`; the function if it has none."""
        name = self.find_name(function)
        return function if name is None else name[1]

    def encode_slow(self, call: CallForm) -> Request | InterceptedRequest:
        """Encode a call that the codec cannot encode, unless interceptors get it first.

        Raises:
            Exception: Whatever pickling the arguments raises; then no reference or tensor has been counted.
        """
        if interception.is_intercepted(self, call):
            label = "to_here" if call.function is None else call.function
            return InterceptedRequest(call, label, call.receiver)
        return self.encode(call)

    def encode(self, call: CallForm, trace: tracing.TraceContext | None = None, headers: SentHeaders = None) -> Request:
        """Encode a call, past all interceptors.

        Args:
            call: The call.
            trace: What the callee records for a profile.
            headers: What the interceptors of the program have added, or None.

        Raises:
            Exception: As `encode_slow`.
        """
        label = label_of(call)  # before any counting: this may run a __repr__ of the program
        flags = flags_of(call)
        pickler = None if flags & FLAG_INTERNAL or is_own(call.function) else self._pickler_of(call.receiver)
        by_pickler = pickler is not None and pickler.carries_function and call.receiver is None
        name = None if by_pickler else call.name
        parts, body = body_of(call, pickler, name is None and not by_pickler)
        ticket, epoch = ticket_for(call)
        context = None if flags & FLAG_INTERNAL else call.context
        # In the metadata, too: decoding the body may fail.
        target = None if call.keep_as is None else RRefId(self.worker_id, call.keep_as)
        spec = MessageSpec(
            target, caller_state(), ticket, epoch, pickler, parts, context, context is not None, headers, trace
        )
        message = self._encode(call, body, spec)
        message = message._replace(flags=flags | message.flags | caller_flags())
        keep = call.receiver if ticket is None else None
        return Request(call.peer, name, message, call.timeout, call.depth, keep, label, call.keep_as)

    def _encode(self, call: CallForm, body: object, spec: MessageSpec) -> Encoded:
        """Encode the body of a call; errors name the arguments of the program."""
        try:
            return self.messages.encode(call.peer, body, spec)
        except SerializationError as error:
            carrier = carrier_of(call.function)
            if carrier is not None:
                rename_path(carrier, error)
            raise

    def _pickler_of(self, receiver: object) -> BodyPickler | None:
        """Return the program's pickler of a call."""
        everywhere: BodyPickler | None = active.get(PICKLER)
        return everywhere if everywhere is not None and receiver is None else self.messages.pickler

    # ---- sending

    def send(self, request: Request | InterceptedRequest, target: CallFuture[object] | InterceptedCreation) -> None:
        """Send a request with a future or a creation as its completion target."""
        if isinstance(request, InterceptedRequest):
            interception.send(self, request.form, target)
        else:
            self.client.start_request(request, target)

    def send_and_wait(self, request: Request | InterceptedRequest) -> object:
        """Send a request and wait for its value."""
        if not isinstance(request, InterceptedRequest):
            return self.client.call_request(request)
        form = request.form
        future = self.future_of(form.peer, request.label, form.timeout)
        with cancel_if_interrupted(future):
            interception.send(self, form, future)
            return future.wait()

    def future_of(self, peer: int, label: object, timeout: int) -> CallFuture[object]:
        """Return the future of a call that has not been sent.

        Args:
            peer: Id of the callee.
            label: The function or its name.
            timeout: Timeout in ns; 0 for none.
        """
        return CallFuture._of(self, (peer, label, timeout))

    def send_message(self, kind: str, peer: int, send: Callable[[], object]) -> None:
        """Send a one-way message through Telegrad's interceptors of this worker.

        Args:
            kind: Kind of the message.
            peer: Id of the receiver.
            send: Sends it; any thread may call it.
        """
        if self.own_interceptors.chain:
            interception.send_message(self, kind, peer, send)
        else:
            send()

    # ---- completions

    def finish(self, future: CallFuture[object], completion: Completion) -> None:
        """Complete a future with the completion of its call."""
        try:
            value = self.result(completion, future._request)
        except BaseException as e:
            self.fail(future, e)
        else:
            complete(future, value)

    @staticmethod
    def fail(future: CallFuture[object], error: BaseException) -> None:
        """Complete a future with an exception."""
        if isinstance(error, Cancelled):
            error.__context__ = None  # what the canceling code handles: its frames refer to the future
        is_raised = is_interrupt(error)
        if is_raised:
            future._mark_read()
        future._fail(error.with_traceback(None))  # its frames refer to the future
        if is_raised:  # complete the future first
            raise clone_exception(error)  # the frames of the caller refer to the future

    def result(self, completion: Completion, call: CallSummary) -> Any:
        """Return the value of a completed call, or raise its exception.

        Args:
            completion: Completion as the engine returns it.
            call: (peer, the function or its name, timeout in ns).
        """
        return self.read(completion, call)[1]

    def read(
        self,
        completion: Completion,
        call: CallSummary,
        value_tag: int = TAG_VALUE,
        on_profile: Callable[[Any], None] | None = None,
    ) -> tuple[int, Any]:
        """Return tag and value of the reply to a call, or raise the call's exception.

        Of a reply CREATED, the value is None.

        Args:
            completion: Completion as the engine returns it.
            call: (peer, the function or its name, timeout in ns).
            value_tag: Tag of a reply with a value.
            on_profile: Gets the report in a reply; None for the observer of calls.
        """
        status, tag, flags, body, segments, _, connection, why, loss = completion
        if status != STATUS_REPLIED:
            raise self._error_without_reply(status, why, loss, call)
        peer, _, _ = call
        messages = self.messages
        metadata = messages.read_metadata(peer, connection, flags, segments) if flags & FLAG_METADATA else NO_METADATA
        if metadata.profile is not None:
            (on_profile or tracing.observer.arrived)(metadata.profile)
        if flags & FLAG_LEFT_OUT:
            raise self._error_of_left_out(body, tag == TAG_VALUE, call)
        if tag == value_tag:
            try:
                return tag, messages.decode(flags, body, segments, metadata.handles, metadata.wrap)
            except Exception as e:
                e.add_note(f"raised here, when the result of {self._text_of(call)} was decoded")
                raise
        if tag == TAG_ERROR:
            raise unpack_exception(body, messages.gate)
        if tag == TAG_CREATED and value_tag == TAG_VALUE:
            return tag, None
        raise TelegradError(
            f"{self.name_of(peer)} replied to {self._text_of(call)} with a message of unknown tag {tag}"
        )

    def _text_of(self, call: CallSummary) -> str:
        """Return a call as error texts name it."""
        peer, label, _ = call
        return f"{label if isinstance(label, str) else name_of(label)} on {self.name_of(peer)}"

    def _error_of_left_out(self, body: Body, is_value: bool, call: CallSummary) -> TelegradError:
        """Return the error of a call whose reply has no content."""
        peer, _, timeout = call
        text = self._text_of(call)
        if body[0] == LeftOut.BROKEN:
            why = bytes(body)[1:].decode(errors="replace")
            return WorkerLost(self.name_of(peer), f"{text}: {why}", self._lost_incarnation(peer, why))
        return error_of(body, f"the result of {text}" if is_value else text, timeout)

    def _error_without_reply(self, status: int, why: str, loss: int, call: CallSummary) -> TelegradError:
        """Return the error of a call that has ended without a reply."""
        peer, _, timeout = call
        text = self._text_of(call)
        if status == Status.TIMED_OUT:
            return RpcTimeout(timeout / 1e9, text, why or "")
        if status == Status.CANCELED:
            return Cancelled(text)
        if status == Status.STOPPED:
            return NotInitialized.closed(f"{text} was pending when this worker shut down. {self.fenced}".rstrip())
        if status in (Status.TOO_LARGE, Status.OVERLOADED):
            return not_sent(status, text, why)
        why = why or "no connection"
        lost = WorkerLost(self.name_of(peer), why, self._lost_incarnation(peer, why))
        lost._loss = loss
        return lost


# ---- messages without their content (csrc/core/left_out.h)


def too_large(call_text: str, why: str) -> MessageTooLarge:
    """Return the error of a request over the limits of its receiver.

    Args:
        call_text: The message, for the error's text.
        why: The core's reason: size, limit and option.
    """
    return MessageTooLarge(f"{call_text}: {why}")


def overloaded(call_text: str, why: str) -> Overloaded:
    """Return the error of a call over a limit of what a worker keeps at once.

    Args:
        call_text: The message, for the error's text.
        why: The core's reason (csrc/core/overload.cc), which begins with the option's name.
    """
    return Overloaded(why.partition(":")[0], f"{call_text}: over {why}")


def not_sent(status: int, call_text: str, why: str) -> MessageTooLarge | Overloaded:
    """Return the error of a request that the core has not sent because of a limit.

    Args:
        status: TOO_LARGE or OVERLOADED.
        call_text: The message, for the error's text.
        why: The core's reason.
    """
    return too_large(call_text, why) if status == Status.TOO_LARGE else overloaded(call_text, why)


def error_of(body: Body, call_text: str, timeout: int = 0) -> TelegradError:
    """Return the error in the body of a message without content.

    Args:
        body: Body of the message: a `LeftOut` and a text.
        call_text: The message, for the error's text.
        timeout: Timeout of the call in ns, for a request that expired.
    """
    kind, *text = bytes(body)
    why = bytes(text).decode(errors="replace")
    if kind == LeftOut.TOO_LARGE:
        return too_large(call_text, why)
    if kind == LeftOut.OVERLOADED:
        return overloaded(call_text, why)
    if kind == LeftOut.CANCELED:
        return Cancelled(call_text)
    if kind == LeftOut.EXPIRED:
        return RpcTimeout(timeout / 1e9, call_text, CallStateText.QUEUED)
    if kind == LeftOut.BROKEN:
        return TelegradError(f"{call_text}: {why}")
    return ReceiverOutOfMemory(
        f"{call_text}: {why} Nothing else is affected: send less at once, or give it more memory."
    )
