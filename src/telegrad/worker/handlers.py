"""The called side: reads requests, runs what they ask for, and replies."""

import logging
import sys
from types import CoroutineType
from typing import Any, NamedTuple

import torch

from telegrad.errors import MessageTooLarge, SerializationError, is_drop_in
from telegrad.protocols.rref import RRefId, RRefProtocolError, Ticket, TicketKind
from telegrad.serialize.exceptions import describe_exception, pack_exception
from telegrad.serialize.names import resolve
from telegrad.serialize.tracebacks import has_let_go_of_frames, let_go_of_frames, show_exception, traceback_of
from telegrad.types import WorkerInfo
from telegrad.wire import ALWAYS_TAKEN, Flag, Tag
from telegrad.worker import lifetimes, profiling
from telegrad.worker.callables import as_torch_says, find_function, run
from telegrad.worker.coroutines import EventLoop
from telegrad.worker.ended import AnyEngine
from telegrad.worker.left_out import error_of
from telegrad.worker.messages import NO_FORK, Encoded, Messages, Preamble
from telegrad.worker.messages import NO_PREAMBLE as _NO_PREAMBLE
from telegrad.worker.references import References, rref_id
from telegrad.worker.scope import Scope, clean_state, current, handler_state
from telegrad.worker.uses import Later, NotYet, method_of

__all__ = ["NOT_PLAIN_REQUEST", "Handlers"]

remote_logger: logging.Logger = logging.getLogger("telegrad.remote")

_CALL, _CREATE, _METHOD, _FETCH, _TYPE = (int(t) for t in (Tag.CALL, Tag.CREATE, Tag.METHOD, Tag.FETCH, Tag.TYPE))
_CREATE_METHOD, _GRADIENTS, _MAKE = int(Tag.CREATE_METHOD), int(Tag.GRADIENTS), int(Tag.MAKE)
_CREATES = (_CREATE, _CREATE_METHOD, _MAKE)
_VALUE, _ERROR, _CREATED = int(Tag.VALUE), int(Tag.ERROR), int(Tag.CREATED)
NOT_PLAIN_REQUEST = int(Flag.BODY | Flag.PREAMBLE | Flag.NO_GRAD | Flag.INFERENCE | Flag.LEFT_OUT)
_PREAMBLE, _STATE = int(Flag.PREAMBLE), int(Flag.NO_GRAD | Flag.INFERENCE)
_MAY_LINGER, _FAILED, _LEFT_OUT = int(Flag.MAY_LINGER), int(Flag.FAILED), int(Flag.LEFT_OUT)

NOT_A_FUTURE = (
    "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but got {}.{} from {}"
)


class Asked(NamedTuple):
    """A request, as far as it is needed to answer it."""

    peer: int
    connection: int
    call: int
    tag: int
    deadline: int
    context: Any = None  # the autograd context in which its tensors and those of the reply are recorded
    recording: profiling.Recording | None = None  # of what runs for it


class Handlers:
    """Answers the requests that reach one worker.

    Args:
        error_level: of the log lines about what user code raises.
    """

    def __init__(
        self,
        worker: Any,
        me: WorkerInfo,
        engine: AnyEngine,
        messages: Messages,
        references: References,
        loop: EventLoop,
        error_level: int,
    ) -> None:
        self._worker = worker
        self._me = me
        self.engine = engine
        self._messages = messages
        self._references = references
        self._loop = loop
        self._error_level = error_level
        self._ready = False
        self._later: set[tuple[int, int]] = set()  # requests whose function has returned before its result is there

    @property
    def async_calls(self) -> int:
        """The number of requests whose result comes later: coroutines, and functions that returned a future."""
        return len(self._later)

    def handle(self, item: tuple[Any, ...]) -> None:
        """Runs one request, as `Engine.next` gives it. Never raises what user code raises."""
        _, _, peer, connection, call, tag, flags, name, body, segments, deadline = item
        if not self._ready:
            self._worker.ready.wait()  # a member that has joined already may call before we know all of them
            self._ready = True
            self.admit_plain()
        if flags & _LEFT_OUT:
            self._refuse(Asked(peer, connection, call, tag, deadline), flags, body, segments)
            return
        if tag == _GRADIENTS:
            self._worker.autograd.on_request(Asked(peer, connection, call, tag, deadline), flags, body, segments)
            clean_state()
            return
        preamble = _NO_PREAMBLE
        try:
            if flags & _PREAMBLE:
                preamble = self._messages.preamble(peer, flags, segments, request=True)
            if tag == _MAKE:
                *body, local_id = self._messages.decode(flags, body, segments, [])
                if type(local_id) is not int or len(body) != 2:
                    raise SerializationError("a request to make a value has no arguments, or no reference to it")
                preamble = _NO_PREAMBLE._replace(target=RRefId(peer, local_id))
        except BaseException as e:
            self.fail(Asked(peer, connection, call, tag, deadline), e)
            return
        context = preamble.context
        current.set(Scope(self._worker, deadline, True, True, context, connection))
        asked = Asked(peer, connection, call, tag, deadline, None if flags & _STATE else context)
        self._handle(asked, flags, name, body, segments, preamble)
        current.set(None)

    def _refuse(self, asked: Asked, flags: int, body: Any, segments: Any) -> None:
        """Answers a request that came without its content, and takes up what its preamble says all the same."""
        try:
            counted = asked.tag != _GRADIENTS
            target = self._messages.preamble(asked.peer, flags, segments, request=counted).target
            if asked.tag in _CREATES and target is not None:
                self._references.accept_create(target, asked.peer)
                self._settle_creation(asked, target, None, error_of(body, f"the creation of {target}"))
                return
        except Exception as e:
            self.fail(asked, e)
            return
        self.reply(asked, _ERROR, Encoded(_LEFT_OUT, bytes(body), None, ()), 0)

    def admit_plain(self) -> None:
        """The core may run plain requests by itself, unless they are to be recorded."""
        if profiling.observer.serving:
            self._worker.plain.close()
        elif self._ready:
            self._worker.plain.open()

    def make(
        self, peer: int, connection: int, call: int, deadline: int, local_id: int, function: Any, args: Any, kwargs: Any
    ) -> bool:
        """Runs the function of a plain request, whose result stays here. True: the core is to say so; it has been
        answered otherwise."""
        target = rref_id((peer, local_id))
        references = self._references
        references.accept_create(target, peer)
        try:
            try:
                result = function(*args, **kwargs)
            except TypeError as e:
                result, error = as_torch_says(function, args, kwargs, e)
                if error is not None:
                    raise
            if type(result) is CoroutineType or hasattr(function, "_wrapped_async_rpc_function"):
                asked = Asked(peer, connection, call, _MAKE, deadline)
                self._answer_later(asked, 0, _NO_PREAMBLE._replace(target=target), result, function)
                return False
        except BaseException as e:  # SystemExit too, as in `_run_now`
            self._settle(Asked(peer, connection, call, _MAKE, deadline), target, None, e)
            return False
        references.settle(target, result, None)
        return True

    def answer(
        self,
        peer: int,
        connection: int,
        call: int,
        deadline: int,
        function: Any,
        args: Any,
        kwargs: Any,
        made: list[Any],
        error: BaseException | None,
        context: Any,
    ) -> None:
        """Answers a request that the core has run, where the answer is not a plain value.

        Args:
            made: the result, as the one item of a list.
        """
        asked = Asked(peer, connection, call, _CALL, deadline, context)
        if type(made[0]) is Later:
            later = made.pop()
            made.append(later.result)
            function = later.method
            del later
        elif type(made[0]) is NotYet:
            self._fetch(asked._replace(tag=_FETCH), made[0].rref)
            clean_state()
            return
        try:
            if error is not None and args is not None and kwargs is not None:
                made[0], error = as_torch_says(function, args, kwargs, error)
            if error is None and comes_later(function, made[0]):
                self._answer_later(asked, 0, _NO_PREAMBLE, made.pop(), function)
                clean_state()
                return
        except BaseException as e:
            made, error = [None], e
        self._settle_made(asked, None, made, error)
        clean_state()

    def _fetch(self, asked: Asked, rref: RRefId) -> None:
        """Answers with a value, once it is there."""
        handles = []
        if not self._references.knows(rref):  # its creation has been overtaken: until it comes, this stands for it
            handles = self._references.receive([Ticket(rref, self._me.id, TicketKind.RETURN, 0)], [NO_FORK], asked.peer)
        preamble = _NO_PREAMBLE._replace(handles=handles, target=rref, context=asked.context)
        self._handle(asked, int(Flag.PREAMBLE), None, b"", [], preamble)

    def _handle(
        self, asked: Asked, flags: int, name: bytes | None, body: Any, segments: Any, preamble: Preamble
    ) -> None:
        tag = asked.tag
        target = preamble.target
        if tag in _CREATES:
            assert target is not None
            try:
                owned = self._references.accept_create(target, asked.peer)
            except RRefProtocolError as e:  # the caller must hear all the same
                self.fail(asked, e)
                return
            owned.scripted = False
        if flags & _PREAMBLE:
            # What it needs may still be on its way: then the request waits there, and no thread with it.
            arrived = (asked, flags, name, body, segments, preamble)

            def resume() -> None:
                self._loop.pool(self._run_parked, *arrived)

            if preamble.handles and self._references.when_confirmed([h.id for h in preamble.handles], resume):
                return
            subject = _subject(tag, preamble)
            if subject is not None and self._references.park(subject, resume):
                return
        self._run(asked, flags, name, body, segments, preamble)

    def _run_parked(self, *arrived: Any) -> None:
        asked = arrived[0]
        current.set(Scope(self._worker, asked.deadline, True, True, arrived[-1].context, asked.connection))
        self._run(*arrived)
        current.set(None)

    def _run(self, asked: Asked, flags: int, name: bytes | None, body: Any, segments: Any, preamble: Preamble) -> None:
        if preamble.profile is not None or profiling.observer.serving:
            asked = asked._replace(recording=profiling.observer.record(self._me.id, preamble.profile))
        guard = None if preamble.context is None else self._worker.autograd.running(preamble.context)
        if guard is None:
            self._run_now(asked, flags, name, body, segments, preamble)
        else:
            with guard:
                self._run_now(asked, flags, name, body, segments, preamble)

    def _run_now(
        self, asked: Asked, flags: int, name: bytes | None, body: Any, segments: Any, preamble: Preamble
    ) -> None:
        try:
            if flags & _STATE or preamble.autocast:
                with handler_state(flags, preamble.autocast):
                    made, function = self._invoke(asked, flags, name, body, segments, preamble)
            else:
                made, function = self._invoke(asked, flags, name, body, segments, preamble)
            if type(made[0]) is NotYet:
                self._fetch(asked._replace(tag=_FETCH), made[0].rref)
                return
            if comes_later(function, made[0]):
                self._answer_later(asked, flags, preamble, made.pop(), function)
                return
        except BaseException as e:  # SystemExit too: it must not end a thread of the pool, and the caller must hear
            self._settle(asked, preamble.target, None, e)
        else:
            self._settle_made(asked, preamble.target, made, None)
        finally:
            clean_state()

    def _invoke(
        self, asked: Asked, flags: int, name: bytes | None, body: Any, segments: Any, preamble: Preamble
    ) -> tuple[list[Any], Any]:
        """Runs the function; its result, as the one item of a list, and the function if it was called (for its
        decorations)."""
        tag = asked.tag
        if tag == _MAKE:
            function = find_function(name or b"")
            args, kwargs = body  # `handle` has read it
        elif tag in (_CALL, _CREATE):
            if name is not None:
                function = find_function(name)
                args, kwargs = self._messages.decode(flags, body, segments, preamble.handles, preamble.wrap)
            else:
                function, args, kwargs = self._messages.decode(flags, body, segments, preamble.handles, preamble.wrap)
        else:
            subject = _subject(tag, preamble)
            if subject is None:
                raise SerializationError(
                    "a request about a reference came without the reference; do all workers run one version?"
                )
            value = self._references.owned(subject).get()
            if tag == _FETCH:
                return [value], None
            if tag == _TYPE:
                return [type(value)], None
            if tag not in (_METHOD, _CREATE_METHOD):
                raise SerializationError(f"a request with unknown tag {tag} came; do all workers run one version?")
            function = method_of(value, resolve(name or b"M"))
            args, kwargs = self._messages.decode(flags, body, segments, preamble.handles, preamble.wrap)
        segments.clear()  # the arguments alone have it: a result that is one of them goes home as it is
        if asked.recording is not None:
            with asked.recording:
                result = run(function, args, kwargs)
        else:
            result = run(function, args, kwargs)
        return ([result.result], result.method) if type(result) is Later else ([result], function)

    # ---- results that come later

    def _answer_later(self, asked: Asked, flags: int, preamble: Preamble, result: Any, function: Any) -> None:
        if lifetimes.forked:
            lifetimes.leave_child(None)
        self._later.add((asked.connection, asked.call))
        if type(result) is CoroutineType:
            self._loop.run(
                result,
                current.get(),
                flags,
                preamble.autocast,
                asked.recording,
                lambda value, error: self._settle_later(asked, preamble.target, value, error),
            )
            return
        if not isinstance(result, torch._C.Future):
            kind = type(result)
            self._later.discard((asked.connection, asked.call))
            raise RuntimeError(NOT_A_FUTURE.format(kind.__module__, kind.__qualname__, function))
        result.add_done_callback(lambda done: self._complete(asked, preamble.target, done))

    def _complete(self, asked: Asked, target: RRefId | None, done: Any) -> None:
        try:
            value = done.value()
        except BaseException as e:  # user code may have put a SystemExit there
            self._settle_later(asked, target, None, e)
        else:
            self._settle_later(asked, target, value, None)

    def _settle_later(self, asked: Asked, target: RRefId | None, value: Any, error: BaseException | None) -> None:
        self._later.discard((asked.connection, asked.call))
        self._settle(asked, target, value, error)

    # ---- replies

    def _settle(self, asked: Asked, target: RRefId | None, value: Any, error: BaseException | None) -> None:
        """The request has its answer."""
        self._settle_made(asked, target, [value], error)

    def _settle_made(self, asked: Asked, target: RRefId | None, made: list[Any], error: BaseException | None) -> None:
        """The same, of a value in a list, which is emptied: what is in lent memory must be the message's alone when
        it leaves."""
        if lifetimes.forked:
            lifetimes.leave_child(error)
        value = made.pop()
        if error is not None:
            self._report(asked, error)
        if asked.tag in _CREATES and target is not None:
            self._settle_creation(asked, target, value, error)
        elif error is not None:
            self.fail(asked, error)
        else:
            try:
                message = self._messages.encode(asked.peer, value, context=asked.context)
            except BaseException as e:  # what pickling it raises, SystemExit too: the caller must hear
                self._report(asked, e)
                self.fail(asked, e)
            else:
                del value
                self.reply(asked, _VALUE, message, 0)

    def _settle_creation(self, asked: Asked, target: RRefId, value: Any, error: BaseException | None) -> None:
        """The value of a reference is there, or an exception in its place."""
        if error is not None:
            let_go_of_frames(error, self._me)
        self._references.settle(target, value, error)
        flags = _MAY_LINGER if error is None else _MAY_LINGER | _FAILED
        self.reply(asked, _CREATED, self._messages.encode(asked.peer, tuple(target)), flags)

    def _report(self, asked: Asked, error: BaseException) -> None:
        """Says on this worker too what its user code raised: in the log, or as torch does, which prints it. Once: a
        reference's failure is not logged again when it is used."""
        if has_let_go_of_frames(error):
            return
        if is_drop_in():
            try:
                print(describe_exception(error, self._me), file=sys.stderr)
            except (OSError, ValueError):  # a closed one: the caller must hear all the same
                pass
        elif remote_logger.isEnabledFor(self._error_level):
            caller = self._worker.name_of(asked.peer)
            remote_logger.log(
                self._error_level, "a call from %s raised %s\n%s", caller, show_exception(error), traceback_of(error)
            )

    def fail(self, asked: Asked, error: BaseException) -> None:
        """Answers with an exception."""
        packed = pack_exception(error, self._me)
        if len(packed) > ALWAYS_TAKEN and len(packed) > (limit := self.engine.largest_body(asked.connection)):
            packed = pack_exception(
                MessageTooLarge(
                    f"{type(error).__qualname__} was raised on worker {self._me.name}, and is too large to be sent: it"
                    f" has {len(packed)} bytes, and the caller's option max_header_bytes allows {limit}."
                ),
                self._me,
            )
        self.reply(asked, _ERROR, Encoded(0, packed, None, ()), 0)
        BaseException.with_traceback(error, None)  # keeping the exception must not keep the request and its arguments

    def reply(self, asked: Asked, tag: int, message: Encoded, flags: int) -> None:
        """Answers."""
        if asked.recording is not None:
            report = asked.recording.report()
            if report is not None:
                message = self._messages.with_report(message, report)
        self.engine.reply(asked.connection, asked.call, tag, message.flags | flags, message.body, message.segments)


def comes_later(function: Any, result: Any) -> bool:
    """Is the result one that has to be waited for?"""
    return type(result) is CoroutineType or hasattr(function, "_wrapped_async_rpc_function")


def _subject(tag: int, preamble: Preamble) -> RRefId | None:
    """The reference whose value a request needs."""
    if tag in (_CALL, _CREATE, _MAKE):
        return None
    if tag == _CREATE_METHOD:
        return preamble.handles[0].id if preamble.handles else None
    return preamble.target
