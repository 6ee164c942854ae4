"""Messages of a worker: values as bytes, with references and call metadata.

A message with references has metadata: a last segment with their tickets (so that the tickets count even if the body
cannot be decoded), the reference to create, and the caller's autocast state. The body names a reference by its index
among the tickets. In an autograd context, the metadata also names the context, and the id under which both ends record
the tensors that require grad. In a profiled request and its reply, the metadata has a trace.

Both ends count tickets and requests in contexts, and the receiver frees what its sender has recorded outside of
contexts. So such a message is delivered even if its caller has stopped waiting (`Flag.MUST_DELIVER`).
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from telegrad.errors import DeviceNotMapped, PickleRefused, RRefNotPicklable, SerializationError
from telegrad.protocols.rref import RRefId, Ticket, TicketKind
from telegrad.serialize.cut_graphs import cut_graphs
from telegrad.serialize.pickling import Serializer, Wrap
from telegrad.serialize.program_pickler import BodyPickler, ByPickler, dump_by_pickler, load_by_pickler
from telegrad.serialize.tensor_layout import Body, Buffer
from telegrad.serialize.unpickling import PickleGate
from telegrad.types import WorkerInfo
from telegrad.wire import ANY_EPOCH, MAX_METADATA, BodyKind
from telegrad.wire.ints import BODY_CODEC, BODY_CUSTOM, BODY_PICKLE, FLAG_BODY, FLAG_METADATA, FLAG_MUST_DELIVER
from telegrad.worker.autograd_hooks import AutogradContext, AutogradHooks
from telegrad.worker.calls.encoded import (
    NO_FORK,
    NO_METADATA,
    PLAIN_MESSAGE,
    CallMetadata,
    Encoded,
    Handle,
    MessageSpec,
    PeerMetadata,
    Recorded,
    Segments,
    SharedBody,
)
from telegrad.worker.calls.headers import SentHeaders, read_headers
from telegrad.worker.scope import Autocast, current_chain

__all__ = ["Messages", "is_serializing"]

logger: logging.Logger = logging.getLogger("telegrad")

is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
_ALL_PEERS = -1  # instead of a peer, for a message to several peers
_MAX_TICKETS = 250_000  # of metadata


class _SerializationState(threading.local):
    """Message that this thread is encoding or decoding."""

    def __init__(self) -> None:
        self.peer: int | None = None  # receiver of the message being encoded
        self.epoch: int = ANY_EPOCH  # of the message
        self.tickets: list[Any] | None = None  # or the references, for several receivers
        self.handles: Sequence[object] = ()


_serialization = _SerializationState()


def is_serializing() -> bool:
    """Return whether this thread is encoding a message, so references can be pickled."""
    return _serialization.peer is not None


class Messages:
    """Encodes and decodes the messages of one worker.

    Args:
        handle_type: Class of references.
        share: Returns the ticket that carries a reference to a peer in an epoch, or raises.
        unshare: Takes back a ticket that was not sent.
        epoch_of: Returns the epoch of tickets for a peer.
        receive: Creates references from a peer's tickets, the numbers of their forks, and the connection.
        new_id: Returns the number of a fork.
        hooks: Autograd contexts of the worker.
        name_of: Returns a worker's name by its id, for errors.
        gate: Permission to load pickles. Without it nothing is pickled either.
        max_objects: Maximum number of objects of a received value.
    """

    def __init__(
        self,
        handle_type: type,
        share: Callable[[object, int, int], Ticket],
        unshare: Callable[[Ticket, int], None],
        epoch_of: Callable[[int], int],
        receive: Callable[[list[Ticket], list[int], int, int], Sequence[Handle]],
        new_id: Callable[[], int],
        hooks: AutogradHooks[Any],
        name_of: Callable[[int], str],
        gate: PickleGate,
        max_objects: int,
    ) -> None:
        self.gate: PickleGate = gate
        self._name_of = name_of
        self._share = share
        self._unshare = unshare
        self._epoch_of = epoch_of
        self._receive = receive
        self._new_id = new_id
        self.hooks = hooks
        self.pickler: BodyPickler | None = None  # of the program
        self._removed_picklers: dict[str, BodyPickler] = {}  # by name
        self.serializer: Serializer = Serializer(max_objects=max_objects, gate=gate)
        self._codec = self.serializer.codec
        self.serializer.register(handle_type, 1, self.pack_handle, self.unpack_handle)
        self.serializer.register(WorkerInfo, 2, lambda info: (info.name, info.id), lambda plain: WorkerInfo(*plain))

    known_picklers: ClassVar[dict[str, BodyPickler]] = {}
    """Picklers that decode messages on each worker, by their name in messages."""

    def pack_handle(self, handle: object) -> int:
        """Add a reference to the message being encoded, and return its index.

        Raises:
            RRefNotPicklable: This thread is not encoding a message.
        """
        peer = _serialization.peer
        if peer is None:
            raise RRefNotPicklable
        if _serialization.tickets is None:
            _serialization.tickets = []
        _serialization.tickets.append(handle if peer == _ALL_PEERS else self._share(handle, peer, _serialization.epoch))
        return len(_serialization.tickets) - 1

    def unpack_handle(self, index: int) -> Any:
        """Return the reference at an index of the message being decoded."""
        return _serialization.handles[index]

    def encode(self, peer: int, value: object, spec: MessageSpec = PLAIN_MESSAGE) -> Encoded:
        """Encode a message's body and metadata.

        Args:
            peer: Receiver.
            value: Content of the body.
            spec: How to encode it.

        Raises:
            Exception: Whatever pickling the value raises; then all tickets are taken back.
        """
        target, autocast, ticket, epoch, custom, parts, context, request, headers, trace = spec
        state = _serialization
        outer = state.peer, state.tickets, state.epoch
        if epoch is None:  # before the tickets: if the session ends meanwhile, the message is not sent
            epoch = self._epoch_of(peer)
        state.peer, state.tickets, state.epoch = peer, None if ticket is None else [ticket], epoch
        try:
            recorded: list[Tensor] | None = None
            if context is not None and not (request and not is_grad_enabled()):
                recorded = []
            flags, body, segments = self._body(peer, value, ticket, custom, parts, recorded)
            tickets = state.tickets
            self._check_ticket_count(tickets)
            made_in = None
            if context is not None and (request or recorded):
                number = self.hooks.on_send(context, peer, recorded or (), request, epoch)
                made_in = None if number is None else (context, number)
            if all(field is None for field in (tickets, target, autocast, made_in, headers, trace)):
                return Encoded(flags, body, segments, ())
            metadata = self._metadata(tickets or (), target, autocast, made_in, trace, headers, ticket, request)
            segments = [*(segments or ()), metadata]
            if not tickets and made_in is None:
                # The owner counts a creation, whose reference ends with the session.
                return Encoded(flags | FLAG_METADATA, body, segments, (), epoch=ANY_EPOCH if target is None else epoch)
            flags |= FLAG_METADATA | FLAG_MUST_DELIVER
            return Encoded(flags, body, segments, tuple(tickets or ()), made_in, epoch)
        except BaseException as e:
            self._return_tickets(peer, keep=None)
            if isinstance(e, DeviceNotMapped):
                to = self._name_of(peer)
                raise type(e)(f"{e} Request device mapping is not available for destination {to}.") from e
            raise
        finally:
            state.peer, state.tickets, state.epoch = outer

    def encode_shared(self, value: object, parts: tuple[str, ...], context: AutogradContext | None) -> SharedBody:
        """Encode the body of a request to several peers.

        Args:
            value: Content of the body.
            parts: Names of the value's items in errors.
            context: Autograd context of the request.

        Raises:
            Exception: Whatever pickling the value raises.
        """
        state = _serialization
        outer = state.peer, state.tickets
        state.peer, state.tickets = _ALL_PEERS, None
        try:
            recorded: list[Tensor] | None = None if context is None or not is_grad_enabled() else []
            flags, body, segments = self._body(_ALL_PEERS, value, None, None, parts, recorded)
            self._check_ticket_count(_serialization.tickets)
            return SharedBody(flags, body, segments, tuple(_serialization.tickets or ()), recorded or ())
        finally:
            state.peer, state.tickets = outer

    def encode_for_peer(
        self, peer: int, shared: SharedBody, autocast: Autocast, context: AutogradContext | None
    ) -> PeerMetadata | None:
        """Encode the metadata for one of several peers; None if it needs none.

        Makes the tickets for the peer and records the tensors.

        Raises:
            RRefError, OwnerLost: A reference cannot be sent to the peer.
        """
        tickets: list[Ticket] = []
        epoch = self._epoch_of(peer)
        try:
            for handle in shared.handles:
                tickets.append(self._share(handle, peer, epoch))
            made_in = None
            if context is not None:
                number = self.hooks.on_send(context, peer, shared.recorded, True, epoch)
                made_in = None if number is None else (context, number)
        except BaseException:
            for ticket in tickets:
                self._unshare(ticket, peer)
            raise
        if not tickets and autocast is None and made_in is None:
            return None
        return PeerMetadata(
            self._metadata(tickets, None, autocast, made_in, None, request=True), tuple(tickets), made_in, epoch
        )

    def encode_internal(self, peer: int, value: object) -> Encoded:
        """Encode an internal message, which usually needs only the codec."""
        coded = self._codec.encode(value)
        if coded is None:
            return self.encode(peer, value)
        return Encoded(BODY_CODEC, coded[0], coded[1], ())

    def _body(
        self,
        peer: int,
        value: object,
        ticket: Ticket | None,
        custom: BodyPickler | None,
        parts: str | tuple[str, ...],
        recorded: list[Any] | None,
    ) -> tuple[int, bytes, Segments | None]:
        """Return the BodyKind, the body and its segments.

        Appends the tensors that require grad to `recorded`.
        """
        if custom is not None:
            assert isinstance(value, ByPickler)
            self._require_pickles(custom.name)
            made = dump_by_pickler(custom, value)
            return BODY_CUSTOM, *self.serializer.dumps(made, recorded=recorded)
        if recorded is None:
            coded = self._codec.encode(value)
            if coded is not None:
                return BODY_CODEC, *coded
        else:
            known = self._codec.encode_recorded(value)
            if known is not None:
                body, segments, tensors = known
                recorded += tensors
                return BODY_CODEC, body, segments
        self._return_tickets(peer, keep=ticket)
        if not self.gate.is_open:
            return self._plain_body(value, parts, recorded)
        return BODY_PICKLE, *self.serializer.dumps(value, parts, recorded)

    def _plain_body(
        self, value: object, parts: str | tuple[str, ...], recorded: list[Any] | None
    ) -> tuple[int, bytes, Segments | None]:
        """Return what `_body` does, for a value that the codec encodes as a copy only."""
        plain = self.serializer.plain.convert(value, parts, recorded is not None)
        if recorded is None:
            coded = self._codec.encode(plain)
        else:
            known = self._codec.encode_recorded(plain)
            coded = None if known is None else known[:2]
            recorded += () if known is None else known[2]
        if coded is None:
            what = parts if isinstance(parts, str) else ", ".join(parts)
            raise PickleRefused(f"cannot send {what} without a pickle (option allow_pickle=False)")
        return BODY_CODEC, *coded

    def _require_pickles(self, pickler: str) -> None:
        if not self.gate.is_open:
            raise PickleRefused(
                f"cannot use the pickler {pickler}: this worker sends no pickles (option allow_pickle=False)"
            )

    def _check_ticket_count(self, tickets: list[object] | None) -> None:
        if tickets is not None and len(tickets) > _MAX_TICKETS:
            raise SerializationError(
                f"a message with {len(tickets)} references exceeds the limit of {_MAX_TICKETS}. Send it in parts."
            )

    def _return_tickets(self, peer: int, keep: Ticket | None) -> None:
        for ticket in _serialization.tickets or ():
            if ticket is not keep and peer != _ALL_PEERS:
                self._unshare(ticket, peer)
        _serialization.tickets = None if keep is None else [keep]

    def rollback(self, peer: int, message: Encoded | PeerMetadata, request: bool) -> None:
        """Undo the effects of encoding a request or a reply that was not sent."""
        for ticket in message.tickets:
            self._unshare(ticket, peer)
        if message.recorded is not None:
            self.hooks.rollback(*message.recorded, peer, message.epoch if request else None)

    def _metadata(
        self,
        tickets: Sequence[Ticket],
        target: RRefId | None,
        autocast: Autocast,
        made_in: Recorded | None,
        profile: object,
        headers: SentHeaders = None,
        about: Ticket | None = None,
        request: bool = False,
    ) -> bytes:
        # The ticket of the message's own reference goes to the owner and is not a fork.
        plain = [
            (*t.rref, t.owner, int(t.kind), t.transfer, NO_FORK if t is about else self._new_id()) for t in tickets
        ]
        context, message = (None, 0) if made_in is None else (made_in[0].id, made_in[1])
        if context == 0 and request:
            context = current_chain()
        return self._plain(
            (plain, None if target is None else tuple(target), autocast, context, message, headers, profile)
        )

    def _plain(self, value: object) -> bytes:
        coded = self._codec.encode(value)
        assert coded is not None
        return coded[0]

    def with_trace(self, message: Encoded, report: object) -> Encoded:
        """Add a report to the reply of a profiled request."""
        segments = list(message.segments or ())
        if message.flags & FLAG_METADATA:
            last = segments.pop()
            assert isinstance(last, bytes)
            *before, _ = cast("tuple[object, ...]", self._codec.decode(last, []))
            metadata = self._plain((*before, report))
        else:
            metadata = self._metadata((), None, None, None, report)
        if len(metadata) > MAX_METADATA:
            logger.warning("the profile of a call is left out of its reply: it has %d bytes", len(metadata))
            return message
        return message._replace(flags=message.flags | FLAG_METADATA, segments=[*segments, metadata])

    def read_metadata(
        self, peer: int, connection: int, flags: int, segments: list[Buffer], *, request: bool = False
    ) -> CallMetadata:
        """Remove and decode the metadata, and receive the references in it.

        Args:
            peer: Sender.
            connection: Connection of the message.
            flags: Flags of the message.
            segments: Segments of the message; the last one is removed.
            request: The message is a request, so an unknown autograd context is created.
        """
        if not flags & FLAG_METADATA:
            return NO_METADATA
        metadata: Any = self._codec.decode(segments.pop(), [])
        plain, target, autocast, context_id, message, given, profile = metadata
        headers = read_headers(given)
        tickets = [Ticket(RRefId(a, b), owner, TicketKind(kind), transfer) for a, b, owner, kind, transfer, _ in plain]
        handles = self._receive(tickets, [ticket[-1] for ticket in plain], peer, connection) if tickets else []
        context = wrap = None
        chain = 0
        if context_id is not None:
            if context_id < 0:
                chain, context_id = context_id, 0
            hooks = self.hooks
            context = (
                hooks.on_request_in_context(context_id, peer, connection)
                if request
                else hooks.find_for_reply(context_id)
            )
            if context is not None and message:
                wrap = hooks.wrap(context, peer, message)
            elif message and not request:  # the program has left the context
                wrap = cut_graphs
        return CallMetadata(
            handles, None if target is None else RRefId(*target), autocast, context, wrap, chain, headers, profile
        )

    def use_pickler(self, pickler: BodyPickler | None) -> None:
        """Set the pickler of the program.

        Without one, removed ones decode the results of calls that have begun.
        """
        if self.pickler is not None:
            self._removed_picklers.pop(self.pickler.name, None)
            self._removed_picklers[self.pickler.name] = self.pickler
        self.pickler = pickler

    def _pickler_of(self, name: str, is_result: bool) -> BodyPickler | None:
        known, removed = self.known_picklers.get(name, self.pickler), self._removed_picklers
        if known is None and is_result:
            return removed.get(name) or next(reversed(removed.values()), None)
        return known

    def decode(
        self, flags: int, body: Body, segments: Sequence[Buffer], handles: Sequence[object], wrap: Wrap | None = None
    ) -> Any:
        """Decode a body.

        Args:
            flags: Flags of the message.
            body: The body.
            segments: Segments of the body.
            handles: References in the metadata.
            wrap: Function for received tensors, from the metadata.

        Raises:
            Exception: Whatever unpickling raises.
        """
        kind, state = flags & FLAG_BODY, _serialization
        outer, state.handles = state.handles, handles
        try:
            if kind == BODY_CODEC:
                return self._codec.decode(body, segments, wrap)
            value = self.serializer.loads(body, segments, wrap)
            if kind == BodyKind.CUSTOM:
                value = load_by_pickler(self._pickler_of(value[0], is_result=value[3] is None), *value)
            return value
        finally:
            state.handles = outer
