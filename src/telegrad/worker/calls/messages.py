"""Values into messages and back: which codec, which references travel, in whose name.

A message that carries references has metadata: a last segment with their tickets (so that they can be honoured even
if the body cannot be read), the reference it is about, and the caller's autocast state. The body then names a reference
by its place among the tickets. A request made in an autograd context names it there, and a message that carries tensors
which require grad has an id of its own, under which both ends record it. Metadata also says what a profiler asks for,
and brings it what was recorded.

Tickets, and requests made in a context, are counted at both ends. So a message with any is sent, or looked at, even if
its caller has given up (`Flag.MUST_DELIVER`).
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from telegrad.errors import DeviceNotMapped, RRefNotPicklable, SerializationError
from telegrad.protocols.rref import RRefId, Ticket, TicketKind
from telegrad.serialize.pickling import Serializer, Wrap
from telegrad.types import WorkerInfo
from telegrad.wire import BodyKind, Flag
from telegrad.worker.autograd_hooks import AutogradHooks
from telegrad.worker.calls.tracing import Span

__all__ = ["NO_FORK", "NO_METADATA", "CallMetadata", "Encoded", "Messages", "SharedBody", "is_serializing"]

logger: logging.Logger = logging.getLogger("telegrad")

_BODY, _METADATA, _CODEC = int(Flag.BODY), int(Flag.METADATA), int(BodyKind.CODEC)  # enumerations are slow
_MUST_DELIVER = int(Flag.MUST_DELIVER)
Segments = list[Any]  # (address, size in bytes, owner), or bytes


class Encoded(NamedTuple):
    """A message ready to leave."""

    flags: int
    body: bytes
    segments: Segments | None
    tickets: tuple[Ticket, ...]
    recorded: tuple[Any, int] | None = None  # the autograd context that it was made in, and its id there (0: none)


class SharedBody(NamedTuple):
    """What several peers are to get, but for what is said to each alone."""

    flags: int
    body: bytes
    segments: Segments | None
    handles: tuple[Any, ...]  # the references in it, by their places
    recorded: Sequence[Any]  # the tensors in it that require grad, if it is made in an autograd context


class PeerMetadata(NamedTuple):
    """What a message to several peers says to one of them alone."""

    metadata: bytes
    tickets: tuple[Ticket, ...]
    recorded: tuple[Any, int] | None  # as of `Encoded`


class CallMetadata(NamedTuple):
    """What stands in front of a body; empty for nearly all calls."""

    handles: list[Any]  # the references that came, as objects
    target: RRefId | None
    autocast: tuple[tuple[str, str], ...] | None
    context: Any = None  # the autograd context that it was made in
    wrap: Wrap | None = None  # what records the tensors that came
    profile: Any = None  # of a request: what to record of it; of a reply: what was (telegrad.worker.calls.tracing)


is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
_ALL_PEERS = -1  # in place of the peer to which a message being written goes
_MAX_TICKETS = 250_000  # of metadata,
_MAX_METADATA = 16 << 20  # and its bytes (Limits::trailer in csrc/core/limits.h)
NO_METADATA = CallMetadata([], None, None)
NO_FORK = -1  # in place of its number, where a ticket travels but no fork is made


class _SerializationContext(threading.local):
    """The message that this thread is writing or reading."""

    def __init__(self) -> None:
        self.peer: int | None = None  # whom the message being written goes to
        self.tickets: list[Any] | None = None  # or, if it goes to several, the references themselves
        self.handles: list[Any] = []


_serialization = _SerializationContext()


def is_serializing() -> bool:
    """Is this thread writing a message? Then references can be pickled."""
    return _serialization.peer is not None


class Messages:
    """Writes and reads the messages of one worker.

    Args:
        handle_type: the class of references.
        share: makes the ticket that carries a reference to a peer; raises if it may not travel.
        unshare: takes back a ticket that did not leave.
        receive: makes references of tickets that came from a peer, and of their forks' numbers.
        new_id: numbers a fork.
        recorder: what knows the autograd contexts.
        name_of: a worker's name by its id, for errors.
    """

    def __init__(
        self,
        handle_type: type,
        share: Callable[[Any, int], Ticket],
        unshare: Callable[[Ticket, int], None],
        receive: Callable[[list[Ticket], list[int], int], list[Any]],
        new_id: Callable[[], int],
        recorder: AutogradHooks,
        name_of: Callable[[int], str],
    ) -> None:
        self._name_of = name_of
        self._share = share
        self._unshare = unshare
        self._receive = receive
        self._new_id = new_id
        self.recorder = recorder
        self.serializer: Serializer = Serializer()
        self._codec = self.serializer.codec
        self.serializer.register(handle_type, 1, self.pack_handle, self.unpack_handle)
        self.serializer.register(WorkerInfo, 2, lambda info: (info.name, info.id), lambda plain: WorkerInfo(*plain))

    @staticmethod
    def load_custom(body: bytes, tensors: list[Any]) -> Any:
        """Reads what a pickler of the program's own wrote; `telegrad.rpc.api` puts the real one here."""
        raise SerializationError(
            "a call came that a pickler of the program's own wrote (rpc.api._use_rpc_pickler), but telegrad.rpc has"
            " not been imported on this worker. Import it there before the call."
        )

    def pack_handle(self, handle: Any) -> int:
        """Adds a reference to the message being written: its place among the tickets.

        Raises:
            RRefNotPicklable: no message is being written.
        """
        peer = _serialization.peer
        if peer is None:
            raise RRefNotPicklable
        if _serialization.tickets is None:
            _serialization.tickets = []
        _serialization.tickets.append(handle if peer == _ALL_PEERS else self._share(handle, peer))
        return len(_serialization.tickets) - 1

    def unpack_handle(self, index: int) -> Any:
        """The reference that came at this place."""
        return _serialization.handles[index]

    def encode(
        self,
        peer: int,
        value: Any,
        target: RRefId | None = None,
        autocast: tuple[tuple[str, str], ...] | None = None,
        ticket: Ticket | None = None,
        custom: Any = None,
        parts: str | tuple[str, ...] = "result",
        context: Any = None,
        request: bool = False,
        span: Span | None = None,
    ) -> Encoded:
        """Writes a message's body and metadata.

        Args:
            peer: whom it goes to.
            value: what the body says.
            target: the reference that the message is about.
            autocast: the caller's state.
            ticket: one that must travel though no reference to it is in the body.
            custom: a pickler of the program's own.
            parts: what an error calls the value, or the parts of one that is a tuple.
            context: the autograd context in which the message is sent.
            request: then it says so, and has its tensors recorded only if grad mode is on; a reply's always are.
            span: of the call in a profile; it ends if this fails.

        Raises:
            what pickling the value raises; the tickets made so far are taken back.
        """
        state = _serialization
        outer = state.peer, state.tickets
        state.peer, state.tickets = peer, None if ticket is None else [ticket]
        try:
            recorded: list[Any] | None = None  # tensors
            if context is not None and not (request and not is_grad_enabled()):
                recorded = []
            flags, body, segments = self._body(peer, value, ticket, custom, parts, recorded)
            tickets = state.tickets
            self._check_ticket_count(tickets)
            message = None
            if request or recorded:
                message = self.recorder.on_send(context, peer, recorded or (), request)
            asked = None if span is None else span.asked
            if tickets is None and target is None and autocast is None and message is None and asked is None:
                return Encoded(flags, body, segments, ())
            context_id = None if message is None else context.id
            metadata = self._metadata(tickets or (), target, autocast, context_id, message or 0, asked, ticket)
            segments = [*(segments or ()), metadata]
            made_in = None if message is None else (context, message)
            flags |= _METADATA | _MUST_DELIVER if tickets or (request and made_in) else _METADATA
            return Encoded(flags, body, segments, tuple(tickets or ()), made_in)
        except BaseException as e:
            if span is not None:
                span.end()
            self._return_tickets(peer, keep=None)
            if isinstance(e, DeviceNotMapped):
                to = self._name_of(peer)
                raise type(e)(f"{e} Request device mapping is not available for destination {to}.") from e
            raise
        finally:
            state.peer, state.tickets = outer

    def encode_shared(self, value: Any, parts: tuple[str, ...], context: Any) -> SharedBody:
        """Writes what the body of a request to several peers says, once for all of them.

        Args:
            parts, context: as of `encode`.

        Raises:
            what pickling the value raises.
        """
        state = _serialization
        outer = state.peer, state.tickets
        state.peer, state.tickets = _ALL_PEERS, None
        try:
            recorded: list[Any] | None = None if context is None or not is_grad_enabled() else []
            flags, body, segments = self._body(_ALL_PEERS, value, None, None, parts, recorded)
            self._check_ticket_count(_serialization.tickets)
            return SharedBody(flags, body, segments, tuple(_serialization.tickets or ()), recorded or ())
        finally:
            state.peer, state.tickets = outer

    def encode_for_peer(
        self, peer: int, written: SharedBody, autocast: tuple[tuple[str, str], ...] | None, context: Any
    ) -> PeerMetadata | None:
        """What is said to one of them alone, or None if there is nothing to say; the tickets and what is recorded are
        made for it.

        Raises:
            RRefError, OwnerLost: a reference cannot travel there.
        """
        tickets: list[Ticket] = []
        try:
            for handle in written.handles:
                tickets.append(self._share(handle, peer))
            message = None if context is None else self.recorder.on_send(context, peer, written.recorded, True)
        except BaseException:
            for ticket in tickets:
                self._unshare(ticket, peer)
            raise
        if not tickets and autocast is None and message is None:
            return None
        context_id = None if message is None else context.id
        metadata = self._metadata(tickets, None, autocast, context_id, message or 0, None)
        return PeerMetadata(metadata, tuple(tickets), None if message is None else (context, message))

    def encode_internal(self, peer: int, value: Any) -> Encoded:
        """As `encode`, of what is most often plain, and has nothing to do with the program's calls."""
        coded = self._codec.encode(value)
        if coded is None:
            return self.encode(peer, value)
        return Encoded(_CODEC, coded[0], coded[1], ())

    def _body(
        self,
        peer: int,
        value: Any,
        ticket: Ticket | None,
        custom: Any,
        parts: str | tuple[str, ...],
        recorded: list[Any] | None,
    ) -> tuple[int, bytes, Segments | None]:
        """A BodyKind, the body, and its segments; `recorded` gets the tensors that require grad."""
        if custom is not None:
            return int(BodyKind.CUSTOM), *self.serializer.dumps(custom.serialize(value), recorded=recorded)
        if recorded is None:
            coded = self._codec.encode(value)
            if coded is not None:
                return _CODEC, *coded
        else:
            known = self._codec.encode_recorded(value)
            if known is not None:
                body, segments, tensors = known
                recorded += tensors
                return _CODEC, body, segments
        self._return_tickets(peer, keep=ticket)
        return int(BodyKind.PICKLE), *self.serializer.dumps(value, parts, recorded)

    def _check_ticket_count(self, tickets: list[Any] | None) -> None:
        if tickets is not None and len(tickets) > _MAX_TICKETS:
            raise SerializationError(
                f"a message with {len(tickets)} references is more than the {_MAX_TICKETS} that one may have. Send it"
                " in parts."
            )

    def _return_tickets(self, peer: int, keep: Ticket | None) -> None:
        for ticket in _serialization.tickets or ():
            if ticket is not keep and peer != _ALL_PEERS:
                self._unshare(ticket, peer)
        _serialization.tickets = None if keep is None else [keep]

    def rollback(self, peer: int, message: Encoded | PeerMetadata) -> None:
        """The message did not leave."""
        for ticket in message.tickets:
            self._unshare(ticket, peer)
        if message.recorded is not None:
            self.recorder.rollback(*message.recorded, peer)

    def _metadata(
        self,
        tickets: Any,
        target: Any,
        autocast: Any,
        context: int | None,
        message: int,
        profile: Any,
        about: Ticket | None = None,
    ) -> bytes:
        # The ticket of the reference that the message is about goes to the owner, and is no fork.
        plain = [
            (*t.rref, t.owner, int(t.kind), t.transfer, NO_FORK if t is about else self._new_id()) for t in tickets
        ]
        return self._plain((plain, None if target is None else tuple(target), autocast, context, message, profile))

    def _plain(self, value: Any) -> bytes:
        coded = self._codec.encode(value)
        assert coded is not None
        return coded[0]

    def with_trace(self, message: Encoded, report: Any) -> Encoded:
        """A message that also says something to a profile: a reply, what was recorded of its request."""
        segments = list(message.segments or ())
        if message.flags & _METADATA:
            *before, _ = cast("tuple[Any, ...]", self._codec.decode(segments.pop(), []))
            metadata = self._plain((*before, report))
        else:
            metadata = self._metadata((), None, None, None, 0, report)
        if len(metadata) > _MAX_METADATA:
            logger.warning("what a profile is to be told of a call is left out: it has %d bytes", len(metadata))
            return message
        return message._replace(flags=message.flags | _METADATA, segments=[*segments, metadata])

    def read_metadata(self, peer: int, flags: int, segments: list[Any], *, request: bool = False) -> CallMetadata:
        """Read and remove the metadata, and accept the references that came with it.

        Args:
            request: an autograd context that is new here begins with it.
        """
        if not flags & _METADATA:
            return NO_METADATA
        metadata: Any = self._codec.decode(segments.pop(), [])
        plain, target, autocast, context_id, message, profile = metadata
        tickets = [Ticket(RRefId(a, b), owner, TicketKind(kind), transfer) for a, b, owner, kind, transfer, _ in plain]
        handles = self._receive(tickets, [ticket[-1] for ticket in plain], peer) if tickets else []
        context = wrap = None
        if context_id is not None:
            recorder = self.recorder
            context = recorder.on_request_in_context(context_id, peer) if request else recorder.find(context_id)
            if context is not None and message:
                wrap = partial(recorder.receive, context, peer, message)
        return CallMetadata(handles, None if target is None else RRefId(*target), autocast, context, wrap, profile)

    def decode(self, flags: int, body: Any, segments: list[Any], handles: list[Any], wrap: Wrap | None = None) -> Any:
        """Reads a body.

        Args:
            handles, wrap: what the metadata brought.

        Raises:
            what unpickling raises.
        """
        kind = flags & _BODY
        state = _serialization
        outer = state.handles
        state.handles = handles
        try:
            if kind == _CODEC:
                return self._codec.decode(body, segments, wrap)
            value = self.serializer.loads(body, segments, wrap)
            return self.load_custom(*value) if kind == BodyKind.CUSTOM else value
        finally:
            state.handles = outer
