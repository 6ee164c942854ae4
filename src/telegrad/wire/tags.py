"""Every kind of message that workers exchange, and what its flags mean.

A message has a tag, flags, perhaps an interned name, a body and segments (docs/protocol.md gives the layout). Tags and
the flags below bit 13 are ours; bits 13 to 15 belong to the core (csrc/core/message.h), which reads bit 2, too.
"""

from enum import IntEnum, IntFlag

__all__ = ["ALWAYS_TAKEN", "BodyKind", "Flag", "LeftOut", "Status", "Tag"]


ALWAYS_TAKEN = 64 << 10  # bytes of a message that every worker takes, whatever its options (csrc/core/limits.h)


class Tag(IntEnum):
    """What a message asks for, or is."""

    # Requests
    CALL = 1  # run the named function: body is (args, kwargs), or (function, args, kwargs) without a name
    CREATE = 2  # the same, and keep the result as the reference that the preamble names
    METHOD = 3  # run the named method of the value that the preamble's reference names: body is (args, kwargs)
    FETCH = 4  # send the value that the preamble's reference names; no body
    TYPE = 5  # send its type; no body
    CREATE_METHOD = 6  # as METHOD, of the value that the first ticket names, and keep the result as CREATE does
    GRADIENTS = 7  # messages of a backward pass
    MAKE = 8  # as CREATE, without a preamble: body is (args, kwargs, local id), plain values

    # Replies
    VALUE = 16  # body is the result
    ERROR = 17  # body is a packed exception
    CREATED = 18  # body is the reference's id: its value, or the exception instead, is in place

    # One-way
    REFERENCES = 32  # body is a message of the reference protocol
    SHUTDOWN = 33  # body is a message of the shutdown protocol
    CONTEXT_ENDED = 35  # body is (id of the autograd context, how many requests the sender made in it)
    GREETING = 34  # nothing: from now on there is a link, so the end of either end is seen


class Flag(IntFlag):
    """How to read the message and in which state to run what it asks for."""

    BODY = 0b11  # a BodyKind
    PREAMBLE = 1 << 2  # the last segment is a Preamble, coded as plain values
    NO_GRAD = 1 << 3  # the caller had switched gradients off
    INFERENCE = 1 << 4  # the caller was in inference mode
    INTERNAL = 1 << 5  # not the program's own call: not counted as work that a shutdown waits for
    FAILED = 1 << 6  # of CREATED: it is the exception that is in place

    LEFT_OUT = 1 << 13  # core: the content is not there; the body is a LeftOut and a text, the only segment a preamble
    MAY_LINGER = 1 << 14  # core: a reply to be looked at, a request to be sent, even if the caller has given up
    NESTED = 1 << 15  # core: made from inside a handler


class BodyKind(IntEnum):
    """How a body is coded."""

    CODEC = 0  # compact plain values (csrc/codec)
    PICKLE = 1  # pickle protocol 5 with tensors out of band (telegrad.serialize.pickling)
    CUSTOM = 2  # a pickler of the program's own, see rpc.api._use_rpc_pickler


class LeftOut(IntEnum):
    """Why the content of a message is not there: the first byte of its body (csrc/core/left_out.h)."""

    TOO_LARGE = ord("L")  # over its receiver's limits
    NO_MEMORY = ord("M")  # its receiver had no memory for it


class Status(IntEnum):
    """What became of a call (csrc/core/calls.h)."""

    PENDING = 0
    REPLIED = 1
    TIMED_OUT = 2
    PEER_LOST = 3
    UNREACHABLE = 4
    STOPPED = 5
    TOO_LARGE = 6
