"""Messages of the reference protocol as plain values, as sent on the network."""

from typing import Any

from telegrad.protocols.rref import Abandon, Accept, Add, Added, Expect, Message, Release, RRefId

__all__ = ["as_plain", "from_plain"]

_MESSAGES: tuple[type, ...] = (Add, Added, Accept, Release, Expect, Abandon)  # their index is their number on the wire


def as_plain(message: Message) -> tuple[object, ...]:
    """Return the plain value of a message."""
    number = _MESSAGES.index(type(message))
    if isinstance(message, Accept):
        return number, tuple(message[0])
    if isinstance(message, Release):
        return number, tuple((tuple(rref), count) for rref, count in message[0])
    if isinstance(message, Abandon):
        return number, tuple(message.rref), str(message.why), message.lost  # `why` may be a `Refusal`
    return (number, tuple(message[0]), *message[1:])


def from_plain(plain: Any) -> Message:
    """Return the message of a plain value."""
    number, *fields = plain
    kind = _MESSAGES[number]
    if kind is Accept:
        return Accept(tuple(fields[0]))
    if kind is Release:
        return Release(tuple((RRefId(*rref), count) for rref, count in fields[0]))
    message: Message = kind(RRefId(*fields[0]), *fields[1:])
    return message
