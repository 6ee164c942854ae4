"""Tags and flags of the messages that workers exchange.

A message has a tag, flags, optionally an interned name, a body and segments (docs/protocol.md has the layout). This
file defines all of them. The core itself reads only the flags that are marked so, METADATA, and no tag.
"""

from enum import IntEnum, IntFlag

__all__ = ["ALWAYS_TAKEN", "MAX_METADATA", "BodyKind", "Flag", "LeftOut", "Status", "Tag"]


ALWAYS_TAKEN = 64 << 10  # bytes; every worker accepts messages of this size, whatever its options
MAX_METADATA = 16 << 20  # bytes; the same on all workers


class Tag(IntEnum):
    """Operation that a request asks for, or kind of a reply or one-way message."""

    # Requests
    CALL = 1  # run a function: body is ([function,] args, kwargs[, keep as][, receiver]), see KEEP_AS and RECEIVER
    GRADIENTS = 7  # messages of a backward pass

    # Replies
    VALUE = 16  # body is the result
    ERROR = 17  # body is a packed exception
    CREATED = 18  # body is the reference's id: the owner has its value, or an exception instead

    # One-way
    REFERENCES = 32  # body is a message of the reference protocol
    SHUTDOWN = 33  # body is a message of the shutdown protocol
    CONTEXT_ENDED = 35  # body is (id of the autograd context, number of requests that the sender made in it)
    MEMBERSHIP = 36  # body is (epoch of the group's log, phase), see worker/membership/service.py
    CONNECT = 34  # no body: opens a connection, so that each worker detects the loss of the other


class Flag(IntFlag):
    """Encoding of the message, and torch state in which the callee runs the request."""

    BODY = 0b11  # a BodyKind
    METADATA = 1 << 2  # the last segment is the call metadata, codec-encoded (layout.MetadataField)
    NO_GRAD = 1 << 3  # gradients were disabled at the caller
    INFERENCE = 1 << 4  # the caller was in inference mode
    INTERNAL = 1 << 5  # not a call of the program: a shutdown does not wait for it
    FAILED = 1 << 6  # of CREATED: the owner has an exception instead of the value
    KEEP_AS = 1 << 7  # of CALL: keep the result as the caller's reference with this local id
    # Of CALL: run it on the value of this reference. Without a name the reply is the value itself. A method's name runs
    # that method; a function's name runs that function, with the value as its first argument.
    RECEIVER = 1 << 8
    LATE = 1 << 9  # of replies, core: the handler has seen that the deadline had passed, so the call times out

    MUST_RUN = 1 << 12  # core: the request runs even if its caller cancels it, is lost, or its deadline has passed
    LEFT_OUT = 1 << 13  # core: content left out; the body is a LeftOut and a text, the only segment the metadata
    MUST_DELIVER = 1 << 14  # core: deliver the request, or read the reply, even if the caller has given up
    NESTED = 1 << 15  # core: made inside a handler


class BodyKind(IntEnum):
    """Encoding of a body."""

    CODEC = 0  # plain values and tensors (csrc/codec)
    PICKLE = 1  # pickle protocol 5 with tensors out of band (telegrad.serialize.pickling)
    CUSTOM = 2  # a pickler of the program, see serialize/program_pickler.py


class LeftOut(IntEnum):
    """Reason for leaving out the content of a message (csrc/core/left_out.h).

    It is the first byte of the body.
    """

    TOO_LARGE = ord("L")  # over the receiver's limits
    NO_MEMORY = ord("M")  # the receiver had no memory for it
    CANCELED = ord("C")  # the caller canceled the request before it ran, or was lost
    EXPIRED = ord("E")  # the deadline of the request passed before it ran
    OVERLOADED = ord("O")  # over a limit of what a worker keeps at once; the text is `option: reason`
    BROKEN = ord("B")  # the connection broke before it had arrived, and its memory may have changed since


class Status(IntEnum):
    """Completion status of a call (csrc/core/call_slab.h)."""

    PENDING = 0
    REPLIED = 1
    TIMED_OUT = 2
    PEER_LOST = 3  # the peer died, left, or broke the connection
    UNREACHABLE = 4  # no connection could be made
    STOPPED = 5  # this worker was stopped
    TOO_LARGE = 6  # the request is over the peer's limits and was not sent
    CANCELED = 7
    OVERLOADED = 8  # over a limit of what a worker keeps at once; the request was not sent
