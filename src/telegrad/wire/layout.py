"""Kinds and layouts that the core and Python share inside one process.

tools/wire_header.py generates csrc/wire/constants.h from this file and from tags.py. tests/static/test_wire.py compares
the positions with the tuples of Python, and with the statements that unpack them.
"""

from enum import IntEnum, StrEnum

__all__ = [
    "ANY_EPOCH", "CallFormField", "CallStateText", "CancelItemField", "CompletionField", "CompletionItemField",
    "EventItemField", "EventKind", "KnownNameField", "Loss", "LossText", "MessageItemField", "MetadataField",
    "NodeKind", "RequestStateText", "ScopeField", "WorkKind",
]  # fmt: skip

ANY_EPOCH = -1  # of messages that may be sent in any session


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
    OLDER = 3  # in the handshake: an older process of the peer has proven its identity


class LossText(StrEnum):
    """Beginning of a reason for the loss of a peer; the name of the peer follows."""

    REPLACED = "another process has become worker"


class MetadataField(IntEnum):
    """Position in the call metadata, the tuple in the last segment of a message."""

    TICKETS = 0  # of the references in the message
    TARGET = 1  # id of the reference that the message is about, or None
    AUTOCAST = 2  # autocast state of the caller, or None
    CONTEXT = 3  # id of the autograd context, or None; 0 or a call chain (negative): no context
    MESSAGE = 4  # id under which both ends record the tensors that require grad; 0: none
    HEADERS = 5  # of a request: what interceptors of the program have added, or None
    PROFILE = 6  # request: what to record; reply: what was recorded; or None


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
    LIMITS_CALLS = 8


class NodeKind(IntEnum):
    """Kind of a node in the walk of an autograd graph."""

    INNER = 0  # the walk continues from it
    LEAF = 1  # several sources may share it
    RECV = 2  # or another end of the walk


class CompletionField(IntEnum):
    """Position in the completion of a call."""

    STATUS = 0  # a Status
    TAG = 1
    FLAGS = 2
    BODY = 3
    SEGMENTS = 4
    PEER = 5
    CONNECTION = 6
    WHY = 7  # the reason, or None; of a timeout a CallStateText
    LOSS = 8  # a Loss


class MessageItemField(IntEnum):
    """Position in a work item with a request or a one-way message."""

    KIND = 0  # a WorkKind, as in all items
    NEEDS_THREAD = 1  # of all items: the pool needs another thread
    PEER = 2
    CONNECTION = 3
    CALL = 4
    TAG = 5
    FLAGS = 6
    NAME = 7
    BODY = 8
    SEGMENTS = 9
    DEADLINE = 10  # monotonic ns; 0: none


class CompletionItemField(IntEnum):
    """Position in a work item with a completion."""

    KIND = 0
    NEEDS_THREAD = 1
    TARGET = 2
    COMPLETION = 3


class EventItemField(IntEnum):
    """Position in a work item with an event."""

    KIND = 0
    NEEDS_THREAD = 1
    EVENT = 2  # an EventKind
    PEER = 3
    INCARNATION = 4
    TEXT = 5


class CancelItemField(IntEnum):
    """Position in a work item with the cancellation of a request."""

    KIND = 0
    NEEDS_THREAD = 1
    CONNECTION = 2
    CALL = 3


class CallFormField(IntEnum):
    """Position in `telegrad.worker.calls.interception.CallForm`."""

    PEER = 0
    FUNCTION = 1
    ARGS = 2
    KWARGS = 3
    TIMEOUT = 4
    DEPTH = 5
    CONTEXT = 6
    MODE = 7
    NAME = 8
    RECEIVER = 9
    INTRODUCE = 10
    KEEP_AS = 11
    INTERNAL = 12


class KnownNameField(IntEnum):
    """Position in an entry of `telegrad.serialize.function_names.NameTable`."""

    NUMBER = 0
    TEXT = 1
    HOME = 2
    MODULE = 3
    NAME = 4
    PATH = 5


class CallStateText(StrEnum):
    """How far a call had come when it timed out (`CallState` in csrc/core/message.h)."""

    UNKNOWN = "unknown"
    WAITING = "waiting"
    QUEUED = "queued"
    RUNNING = "running"
    REPLY_LOST = "reply lost"


class RequestStateText(StrEnum):
    """State of a request without a reply (`RequestSnapshot` in csrc/core/snapshot.h)."""

    QUEUED = "queued"
    RUNNING = "running"
    PARKED = "parked"
    DEFERRED = "deferred"
