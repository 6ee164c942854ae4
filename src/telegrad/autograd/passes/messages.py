"""Messages of a pass as they travel.

A message of a pass is a tuple that begins with its kind, an int. It has ints, bytes, texts and tuples of them;
`GRADIENTS` also has a list of tensors and None, and the *mode* of the pass as an int.
"""

from collections.abc import Iterable

from telegrad.autograd.context import WireMessage
from telegrad.protocols.backward_messages import (
    Abort,
    Failed,
    Finish,
    Lost,
    Mark,
    Marked,
    Message,
    Report,
    Token,
    TokenKind,
)

__all__ = [
    "ABORT",
    "ALONE",
    "DISCARD",
    "FAILED",
    "FINISH",
    "GRADIENTS",
    "LOST",
    "MARK",
    "MARKED",
    "REPORT",
    "RETAIN",
    "decode_message",
    "encode_message",
    "fast_report",
]

_GRADIENT = int(TokenKind.GRADIENT)

GRADIENTS, MARK, MARKED, FINISH, REPORT, FAILED, LOST, ABORT = range(8)

# Bits of the mode:
RETAIN = 1  # torch keeps the graph
DISCARD = 2  # in a plain context: a pass of `torch.autograd.grad`, which adds nothing to `.grad`
ALONE = 4  # of one message, in a plain context: no other gradients of the pass are under way, or will be sent


def decode_message(message: WireMessage) -> Message:
    """Return a message other than GRADIENTS, as the schedule processes it."""
    kind = message[0]
    if kind == REPORT:
        return Report(*message[1])
    if kind == MARK:
        return Mark(message[1])
    if kind == MARKED:
        return Marked()
    if kind == FINISH:
        return Finish()
    if kind == FAILED:
        return Failed(message[1])
    if kind == LOST:
        return Lost(message[1], message[2])
    if kind == ABORT:
        return Abort(message[1])
    raise ValueError(f"unknown kind of message of a backward pass: {kind!r}")


def encode_message(message: Message) -> WireMessage:
    """Return a message other than `Gradients` and `Abort` as it travels."""
    if isinstance(message, Report):
        return REPORT, tuple(message)
    if isinstance(message, Mark):
        return MARK, message.sends
    if isinstance(message, Failed):
        return FAILED, message.why
    if isinstance(message, Lost):
        return LOST, message.peer, message.why
    return (MARKED,) if isinstance(message, Marked) else (FINISH,)


def fast_report(consumed: Iterable[int], produced: Iterable[int], to: int) -> tuple[object, ...]:
    """Return the only `Report` of a worker on the fast path, as it travels.

    The worker has processed the gradients of the messages `consumed`, and has sent those of `produced` to the worker
    `to`.
    """
    processed: list[Token] = []
    for send in consumed:
        processed.append((_GRADIENT, send))
    sent: list[tuple[Token, int]] = []
    for send in produced:
        sent.append(((_GRADIENT, send), to))
    return 1, tuple(processed), tuple(sent), False, False
