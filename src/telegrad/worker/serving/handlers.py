"""The callee's slow path: requests that the native server leaves to Python.

The server (csrc/python/server.cc) decodes and runs a request, and replies. Python takes part if the codec cannot decode
or encode, if the caller's torch state has to be entered, or if a result or an error is deferred.
"""

import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

import torch

from telegrad._core import Request
from telegrad.errors import Cancelled, MessageTooLarge, NotInitialized, Overloaded, SerializationError, is_drop_in
from telegrad.options import Options
from telegrad.protocols.rref import RRefId
from telegrad.serialize.exceptions import describe_exception, pack_exception
from telegrad.serialize.program_pickler import ByPickler
from telegrad.serialize.tensor_layout import Body, Buffer
from telegrad.serialize.tracebacks import clear_frames, frames_cleared, is_interrupt, show_exception, traceback_of
from telegrad.types import WorkerInfo
from telegrad.wire import ALWAYS_TAKEN, LeftOut
from telegrad.wire.ints import (
    FLAG_FAILED,
    FLAG_KEEP_AS,
    FLAG_LEFT_OUT,
    FLAG_MUST_DELIVER,
    FLAGS_OF_TORCH_STATE,
    TAG_CALL,
    TAG_CREATED,
    TAG_ERROR,
    TAG_GRADIENTS,
    TAG_VALUE,
)
from telegrad.worker import process_hooks
from telegrad.worker.autograd_hooks import AutogradHooks
from telegrad.worker.calls import tracing
from telegrad.worker.calls.client import error_of
from telegrad.worker.calls.encoded import Encoded, MessageSpec
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.interceptors import Interceptors
from telegrad.worker.calls.messages import Messages
from telegrad.worker.closed import AnyEngine, AnyServer
from telegrad.worker.membership.members import Members
from telegrad.worker.refs.owned_value import OwnedValue
from telegrad.worker.refs.references import References
from telegrad.worker.scope import clean_state, current
from telegrad.worker.serving.deferred_results import deferred_result
from telegrad.worker.serving.event_loop import DeferredRequest, EventLoop
from telegrad.worker.serving.exposure import AllowAll, AllowList
from telegrad.worker.serving.intercepted import InterceptedHandler
from telegrad.worker.serving.once import RememberedRuns
from telegrad.worker.serving.request_info import RequestInfo
from telegrad.worker.serving.slow_request import SlowRequest

__all__ = ["Handlers"]

remote_logger: logging.Logger = logging.getLogger("telegrad.remote")


class HandlingWorker(Protocol):
    """`telegrad.worker.worker.Worker`, as this module uses it."""

    options: Options
    closed: bool
    ready: threading.Event
    members: Members
    autograd: AutogradHooks[Any]
    server: AnyServer
    remembered_runs: RememberedRuns


class Handlers:
    """Replies to the requests of one worker.

    Args:
        worker: The worker.
        info: Name and id of the worker.
        engine: The native engine; the worker replaces it when it closes.
        messages: Encodes and decodes messages.
        references: References of the worker.
        loop: Event loop for coroutines.
        submit: Runs a function on a thread of the pool.
        error_level: Level of the log lines about errors of user code.
        exposure: What other workers may call.
    """

    def __init__(
        self,
        worker: HandlingWorker,
        info: WorkerInfo,
        engine: AnyEngine,
        messages: Messages,
        references: References,
        loop: EventLoop,
        submit: Callable[..., None],
        error_level: int,
        exposure: AllowAll | AllowList,
    ) -> None:
        self.worker: HandlingWorker = worker
        self.exposure: AllowAll | AllowList = exposure
        self.engine = engine
        self.messages = messages
        self.values: dict[RRefId, OwnedValue] = references.values
        self.on_gradients: Callable[..., None] = worker.autograd.on_gradients
        self.on_context_ended: Callable[..., None] = worker.autograd.on_ended
        self.wait_ready: Callable[[], object] = worker.ready.wait
        self._info = info
        self._references = references
        self.loop: EventLoop = loop
        self._submit = submit
        self._error_level = error_level
        self.interceptors: Interceptors = Interceptors(self.update_recording)
        self._deferred: dict[tuple[int, int], DeferredRequest] = {}  # requests with a deferred result
        self._parked: set[object] = set()  # requests that wait for their inputs, or run since these are ready

    @property
    def async_calls(self) -> int:
        """Return the number of requests with a deferred result."""
        return len(self._deferred)

    @property
    def parked_requests(self) -> int:
        """Return the number of requests that wait for inputs, or run since then."""
        return len(self._parked)

    def deferred_requests(self) -> dict[tuple[int, int], DeferredRequest]:
        """Return the requests with a deferred result by connection and call."""
        return self._deferred.copy()

    def name_deferred(self, function: str) -> None:
        """Set the name of the request that the running coroutine serves."""
        scope = current.get()
        deferred = None if scope is None else self._deferred.get((scope.connection, scope.call))
        if deferred is not None:
            deferred.name = function

    def update_recording(self) -> None:
        """Have Python prepare all requests if a profile or interceptor needs them."""
        self.worker.server.record_all(tracing.observer.serving or bool(self.interceptors.chain))

    # ---- requests

    def prepare(
        self, info: RequestInfo, tag: int, flags: int, body: Body, segments: list[Buffer]
    ) -> SlowRequest | None:
        """Read the metadata of a request; None if another part replies."""
        if flags & FLAG_LEFT_OUT:
            self._reply_left_out(info, tag, flags, body, segments)
            return None
        if tag == TAG_GRADIENTS:
            self.worker.autograd.on_request(info, flags, body, segments)
            clean_state()
            return None
        if tag != TAG_CALL:
            raise SerializationError(f"a request with unknown tag {tag} came; do all workers run one version?")
        metadata = self.messages.read_metadata(info.peer, info.connection, flags, segments, request=True)
        target = metadata.target
        if target is not None:
            if not flags & FLAG_KEEP_AS:
                raise SerializationError("a request names a reference to create, and is to create none")
            target = self.accept(info.peer, target.local_id, info.connection)
        recording = None
        if metadata.profile is not None or tracing.observer.serving:
            recording = tracing.observer.record(self._info.id, metadata.profile)
        context = None if flags & FLAGS_OF_TORCH_STATE else metadata.context
        info = info._replace(target=target, context=context, recording=recording)
        return SlowRequest(self, info, flags, body, segments, metadata)

    def _reply_left_out(self, info: RequestInfo, tag: int, flags: int, body: Body, segments: list[Buffer]) -> None:
        """Reply to a request without content, after processing its metadata."""
        try:
            metadata = self.messages.read_metadata(
                info.peer, info.connection, flags, segments, request=tag != TAG_GRADIENTS
            )
            target = metadata.target
            if flags & FLAG_KEEP_AS and target is not None:
                target = self.accept(info.peer, target.local_id, info.connection)
                self._set_creation_result(info, target, None, error_of(body, f"the creation of {target}"))
                return
        except Exception as e:
            self.fail(info, e)
            return
        self.reply(info, TAG_ERROR, Encoded(FLAG_LEFT_OUT, bytes(body), None, ()), 0)

    def accept(self, peer: int, local_id: object, connection: int) -> RRefId:
        """Accept the creation of a reference. A peer creates only its own ids."""
        if type(local_id) is not int:
            raise SerializationError("a request is to create a reference but does not name it")
        rref = RRefId(peer, local_id)
        self._references.accept_create(rref, peer, connection)
        return rref

    def set_result(self, target: RRefId, value: object) -> None:
        """Keep the value of a creation."""
        self._references.set_result(target, value, None)

    def park(
        self, request: Request, slow: SlowRequest | None, receiver: tuple[int, int] | None, fetches: bool, peer: int
    ) -> bool:
        """Resume a request once its inputs are ready, without blocking a thread.

        Args:
            request: The server's request.
            slow: Python's part of the request; without a receiver, its references have to be confirmed.
            receiver: The reference to the value that the request needs.
            fetches: The request reads the value, and its creation may still be on its way.
            peer: The caller.

        Returns:
            False if all inputs are ready.

        Raises:
            Overloaded: Too many requests are parked.
        """
        most = self.worker.options.max_waiting_messages
        if self.engine.parked() > most:
            why = f"{most} requests already wait for references at worker {self._info.name}"
            raise Overloaded("max_waiting_messages", f"over max_waiting_messages: {why}. Await some results first.")
        references, parked, is_parked = self._references, object(), False
        self._parked.add(parked)
        try:
            if receiver is None:
                assert slow is not None
                handles = slow.metadata.handles
                is_parked = references.when_confirmed(
                    [h.id for h in handles], lambda: self._submit(self._resume, request, handles, parked)
                )
            else:
                rref = RRefId(*receiver)
                handles = []
                if fetches and not references.knows(rref):  # a placeholder until the creation arrives
                    handles = references.hold(rref, peer)
                is_parked = references.park(rref, lambda: self._submit(self._resume, request, handles, parked))
        finally:
            if not is_parked:
                self._parked.discard(parked)
        return is_parked

    def _resume(self, request: Request, _: object, parked: object) -> None:
        try:
            self.worker.server.resume(request)
        finally:
            self._parked.discard(parked)  # afterwards: a worker that leaves waits until the reply is sent

    def value_of(self, receiver: tuple[int, int]) -> Any:
        """Return the value of a reference, or raise the error of its creation."""
        return self._references.owned(RRefId(*receiver)).get()

    # ---- results

    def reply_when_done(self, info: RequestInfo, slow: SlowRequest | None, result: object, function: object) -> None:
        """Reply with the result of a coroutine or future once it is done."""
        if process_hooks.forked:
            process_hooks.leave_child(None)
        waiting = deferred_result(function, result)
        assert waiting is not None
        deferred = self._defer(info, function)
        if isinstance(waiting, Coroutine):
            flags, autocast = (0, None) if slow is None else (slow.handler_flags, slow.handler_autocast)
            deferred.begin(
                self.loop.run(
                    waiting, current.get(), flags, autocast, info.recording,
                    lambda value, error: self._reply_deferred(info, value, error),
                )
            )  # fmt: skip
            return
        waiting.add_done_callback(lambda done: self._complete(info, done))
        if isinstance(function, InterceptedHandler):
            deferred.begin(function.cancel)
        elif isinstance(waiting, CallFuture):
            deferred.begin(waiting.cancel)

    def _defer(self, info: RequestInfo, function: object) -> DeferredRequest:
        """Register a request with a deferred result, before the result can arrive."""
        if isinstance(function, InterceptedHandler):
            function = function.function
        deferred = self._deferred[info.connection, info.call] = DeferredRequest(info.peer, function, info.deadline)
        if info.target is None and self.engine.detach(info.connection, info.call, True):
            self._cancel(deferred, info.connection, info.call)
        return deferred

    def cancel(self, item: tuple[Any, ...]) -> None:
        """Cancel the coroutine of a request, or the call that it awaits."""
        _, _, connection, call = item
        deferred = self._deferred.get((connection, call))
        if deferred is not None:
            self._cancel(deferred, connection, call)

    def _cancel(self, deferred: DeferredRequest, connection: int, call: int) -> None:
        if self.engine.is_open(connection):  # else the caller may ask again in its next session
            self.worker.remembered_runs.cancel((connection, call))
        deferred.cancel()

    def _complete(self, info: RequestInfo, done: torch.futures.Future[object]) -> None:
        try:
            value = done.value()
        except BaseException as e:  # may be a SystemExit from user code
            original = done.failure() if isinstance(done, CallFuture) else None  # of a coroutine, with its traceback
            self._reply_deferred(info, None, e if original is None or original.__traceback__ is None else original)
        else:
            self._reply_deferred(info, value, None)

    def _reply_deferred(self, info: RequestInfo, value: object, error: BaseException | None) -> None:
        key = info.connection, info.call
        deferred = self._deferred.get(key)
        try:
            if deferred is not None and deferred.canceled and isinstance(error, Cancelled):
                self.reply_canceled(info, True)
            elif error is not None:
                self.reply_error(info, error)
            else:
                made = [value]
                del value
                self.reply_slow(info, made)
        finally:
            self._deferred.pop(key, None)  # afterwards: a worker that leaves waits until the reply is sent

    def reply_slow(self, info: RequestInfo, made: list[object]) -> None:
        """Reply with the result in a list, and empty the list.

        Only the message may refer to leased memory when it is sent.
        """
        if process_hooks.forked:
            process_hooks.leave_child(None)
        value = made.pop()
        pickler = self.messages.pickler if info.by_pickler else None
        if info.target is not None:
            self._set_creation_result(info, info.target, value, None)
            return
        try:
            sent = value if pickler is None else ByPickler(None, value, ())
            message = self.messages.encode(info.peer, sent, MessageSpec(custom=pickler, context=info.context))
        except BaseException as e:  # errors of pickling, SystemExit too: the caller needs a reply
            try:
                self.report(info.peer, e)
            finally:
                self.fail(info, e)
        else:
            del value, sent
            self.reply(info, TAG_VALUE, message, 0)

    def reply_error(self, info: RequestInfo, error: BaseException) -> None:
        """Reply with the exception of the function, or of a check before the function ran."""
        if process_hooks.forked:
            process_hooks.leave_child(error)
        try:
            self.report(info.peer, error)
        finally:
            if info.target is not None:
                self._set_creation_result(info, info.target, None, error)
            else:
                self.fail(info, error)

    def reply_canceled(self, info: RequestInfo, canceled: bool) -> None:
        """Reply to a request that has not run, or that was canceled while it ran.

        Args:
            info: The request.
            canceled: False if its deadline has passed before it ran.
        """
        why = LeftOut.CANCELED if canceled else LeftOut.EXPIRED
        self.reply(info, TAG_ERROR, Encoded(FLAG_LEFT_OUT, bytes([why]), None, ()), 0)

    def _set_creation_result(
        self, info: RequestInfo, target: RRefId, value: object, error: BaseException | None
    ) -> None:
        """Set the value of a reference, or the exception of its creation."""
        if error is not None:
            clear_frames(error, self._info)
        self._references.set_result(target, value, error)
        flags = FLAG_MUST_DELIVER if error is None else FLAG_MUST_DELIVER | FLAG_FAILED
        self.reply(info, TAG_CREATED, self.messages.encode(info.peer, tuple(target)), flags)

    def report(self, peer: int, error: BaseException) -> None:
        """Log an error of user code on this worker; under the drop-in, print it.

        Each error is reported once: the failure of a reference is not logged again when the reference is used. What the
        program's handlers and filters of the log raise is printed: to log it would run them again.

        Args:
            peer: Id of the caller.
            error: The error, with its traceback.
        """
        if frames_cleared(error):
            return
        try:
            self._log(peer, error)
        except BaseException as e:
            if is_interrupt(e):
                raise
            with suppress(Exception):  # closed streams
                print(f"worker {self._info.name} cannot log an error of a call: {traceback_of(e)}", file=sys.stderr)

    def _log(self, peer: int, error: BaseException) -> None:
        if is_drop_in():
            with suppress(OSError, ValueError):  # closed streams
                print(describe_exception(error, self._info), file=sys.stderr)
        elif remote_logger.isEnabledFor(self._error_level):
            caller = self.worker.members.name_of(peer)
            remote_logger.log(
                self._error_level, "a call from %s raised %s\n%s", caller, show_exception(error), traceback_of(error)
            )

    def fail(self, info: RequestInfo, error: BaseException) -> None:
        """Reply with an exception."""
        if isinstance(error, NotInitialized) and self.worker.closed:
            return  # the caller gets WorkerLost: this worker is leaving, not the caller
        packed = pack_exception(error, self._info, self.messages.gate)
        if len(packed) > ALWAYS_TAKEN and len(packed) > (limit := self.engine.largest_body(info.connection)):
            packed = pack_exception(
                MessageTooLarge(
                    f"{type(error).__qualname__} was raised on worker {self._info.name}, and is too large to be sent:"
                    f" it has {len(packed)} bytes, and the caller's option max_header_bytes allows {limit}."
                ),
                self._info,
                self.messages.gate,
            )
        self.reply(info, TAG_ERROR, Encoded(0, packed, None, ()), 0)
        BaseException.with_traceback(error, None)  # an exception that is kept must not keep the request's arguments

    def reply(self, info: RequestInfo, tag: int, message: Encoded, flags: int) -> None:
        """Send a reply."""
        if info.recording is not None:
            report = info.recording.report()
            if report is not None:
                message = self.messages.with_trace(message, report)
        sent = self.engine.reply(info.connection, info.call, tag, message.flags | flags, message.body, message.segments)
        if not sent:
            self.messages.rollback(info.peer, message, request=False)
