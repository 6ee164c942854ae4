"""Encoded messages, and the decoded metadata of a message."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from telegrad.protocols.rref import RRefId, Ticket
from telegrad.serialize.pickling import Wrap
from telegrad.serialize.program_pickler import BodyPickler
from telegrad.wire import ANY_EPOCH
from telegrad.worker.autograd_hooks import AutogradContext
from telegrad.worker.calls.headers import NO_HEADERS, Headers, SentHeaders
from telegrad.worker.calls.tracing import TraceContext
from telegrad.worker.scope import Autocast

__all__ = [
    "NO_FORK", "NO_METADATA", "PLAIN_MESSAGE", "CallMetadata", "Encoded", "Handle", "MessageSpec", "PeerMetadata",
    "Recorded", "Request", "Segments", "SharedBody",
]  # fmt: skip

NO_FORK = -1  # instead of a number, for a ticket without a fork
Recorded: TypeAlias = tuple[AutogradContext, int]  # the autograd context, and the message's id there (0: none)
Segments = Sequence[object]  # (address, size in bytes, owner), or bytes


class Handle(Protocol):
    """Python object of a reference (`telegrad.rref.rref.RRef`)."""

    id: RRefId


class MessageSpec(NamedTuple):
    """How to encode a message."""

    target: RRefId | None = None  # the reference that the request creates
    autocast: Autocast = None  # of the caller
    ticket: Ticket | None = None  # to send for a reference that is not in the body
    epoch: int | None = None  # of the ticket; None: the present one
    custom: BodyPickler | None = None  # the program's pickler; then the value is a `ByPickler`
    parts: str | tuple[str, ...] = "result"  # name of the value in errors, or names of a tuple's items
    context: AutogradContext | None = None  # in which its tensors are recorded; of a request only in grad mode
    is_request: bool = False  # its metadata names the context
    headers: SentHeaders = None  # of a request
    trace: TraceContext | None = None  # what the callee records for a profile


PLAIN_MESSAGE = MessageSpec()


class Encoded(NamedTuple):
    """Encoded message, ready to be sent."""

    flags: int
    body: bytes
    segments: Segments | None
    tickets: tuple[Ticket, ...]
    recorded: Recorded | None = None
    epoch: int = ANY_EPOCH  # of the tickets and the context; the end of a session with the peer ends it


class Request(NamedTuple):
    """Encoded request, ready to be sent."""

    peer: int
    name: tuple[int, bytes] | None
    message: Encoded
    timeout: int  # ns; 0: none
    depth: int  # of nested calls; 0: no handler makes the call
    keep: object  # kept alive until the reply arrives
    label: object  # for error messages: a name such as "f" or "to_here", or a function
    keep_as: int | None


class SharedBody(NamedTuple):
    """Encoded body of a message to several peers, without the metadata of each peer."""

    flags: int
    body: bytes
    segments: Segments | None
    handles: tuple[object, ...]  # the references in the body, by index
    recorded: Sequence[Tensor]  # in an autograd context: the tensors that require grad


class PeerMetadata(NamedTuple):
    """Metadata for one of several receivers of a message."""

    metadata: bytes
    tickets: tuple[Ticket, ...]
    recorded: Recorded | None
    epoch: int


class CallMetadata(NamedTuple):
    """Decoded metadata of a message; empty for most calls."""

    handles: Sequence[Handle]  # the received references
    target: RRefId | None
    autocast: Autocast
    context: AutogradContext | None = None  # the sender's autograd context
    wrap: Wrap | None = None  # records received tensors
    chain: int = 0  # the caller's call chain outside of contexts; 0: none
    headers: Headers = NO_HEADERS  # of a request
    profile: Any = None  # of a request a `TraceContext`, of a reply a `Report`


NO_METADATA = CallMetadata((), None, None)
