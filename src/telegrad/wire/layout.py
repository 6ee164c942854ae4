"""Kinds and layouts that the core and Python share inside one process.

tools/wire_header.py generates csrc/wire/constants.h from this file and from tags.py.
"""

from enum import IntEnum

__all__ = ["EventKind", "Loss", "MetadataField", "NodeKind", "ScopeField", "WorkKind"]


class WorkKind(IntEnum):
    """Kind of a work item that the core gives to a pool thread."""

    REQUEST = 0
    ONEWAY = 1
    COMPLETION = 2  # of an asynchronous call
    EVENT = 3
    EXIT_THREAD = 4  # the thread is no longer needed
    NO_WORK = 5  # the core has processed the item: ask for the next one
    CANCEL = 6  # the caller of a request with a deferred result has canceled it, or was lost
    VERIFY = 7  # whether the memory of sent messages has changed; only inside the core


class EventKind(IntEnum):
    """Kind of an event."""

    PEER_LOST = 0
    PEER_LEFT = 1
    LOG = 2
    CALLBACK = 3  # requested with `Engine.request_callback`
    PEER_BACK = 4
    CONNECTED = 5
    REPLACED = 6  # a peer has refused this worker: a newer process has its name


class Loss(IntEnum):
    """Kind of the loss of a peer (csrc/core/link_error.h).

    Of a call that ends with `Status.PEER_LOST` or `Status.UNREACHABLE`.
    """

    OTHER = 0
    CLOSED = 1  # the connection was closed without a goodbye
    REFUSED = 2  # in the handshake: the peer has refused this worker, or has not proven the group's secret


class MetadataField(IntEnum):
    """Position in the call metadata, the tuple in the last segment of a message."""

    TICKETS = 0  # of the references in the message
    TARGET = 1  # id of the reference that the message is about, or None
    AUTOCAST = 2  # autocast state of the caller, or None
    CONTEXT = 3  # id of the autograd context, or None; 0 or a call chain (negative): no context
    MESSAGE = 4  # id under which both ends record the tensors that require grad; 0: none
    PROFILE = 5  # request: what to record; reply: what was recorded; or None


class ScopeField(IntEnum):
    """Position in `telegrad.worker.scope.Scope`."""

    WORKER = 0
    DEADLINE = 1
    DEPTH = 2
    REQUEST = 3
    AUTOGRAD = 4
    CONNECTION = 5
    CALL = 6
    CHAIN = 7


class NodeKind(IntEnum):
    """Kind of a node in the walk of an autograd graph."""

    INNER = 0  # the walk continues from it
    LEAF = 1  # several sources may share it
    RECV = 2  # or another end of the walk
