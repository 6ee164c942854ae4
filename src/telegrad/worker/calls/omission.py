"""Messages that arrive without their content, or were not sent because of it (csrc/core/left_out.h)."""

from typing import Any

from telegrad.errors import MessageTooLarge, ReceiverOutOfMemory, TelegradError
from telegrad.wire import LeftOut

__all__ = ["error_of", "too_large"]


def too_large(what: str, why: str) -> MessageTooLarge:
    """Make the error of a request over the limits of its receiver.

    Args:
        what: the message, for the error's text.
        why: the core's account: size, limit and option.
    """
    return MessageTooLarge(f"{what}: {why}")


def error_of(body: Any, what: str) -> TelegradError:
    """Make the error that the body of a message without its content stands for.

    Args:
        body: as it came, a `LeftOut` and a text.
        what: the message, for the error's text.
    """
    kind, *text = bytes(body)
    why = bytes(text).decode(errors="replace")
    if kind == LeftOut.TOO_LARGE:
        return too_large(what, why)
    return ReceiverOutOfMemory(f"{what}: {why} Nothing else is affected: send less at once, or give it more memory.")
