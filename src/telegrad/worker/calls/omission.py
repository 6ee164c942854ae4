"""Messages that arrive without their content, or were not sent because of it.

csrc/core/left_out.h is the native part.
"""

from typing import Any

from telegrad.errors import MessageTooLarge, ReceiverOutOfMemory, TelegradError
from telegrad.wire import LeftOut

__all__ = ["error_of", "too_large"]


def too_large(call_text: str, why: str) -> MessageTooLarge:
    """Return the error of a request over the limits of its receiver.

    Args:
        call_text: The message, for the error's text.
        why: The core's reason: size, limit and option.
    """
    return MessageTooLarge(f"{call_text}: {why}")


def error_of(body: Any, call_text: str) -> TelegradError:
    """Return the error in the body of a message without content.

    Args:
        body: Body of the message: a `LeftOut` and a text.
        call_text: The message, for the error's text.
    """
    kind, *text = bytes(body)
    why = bytes(text).decode(errors="replace")
    if kind == LeftOut.TOO_LARGE:
        return too_large(call_text, why)
    return ReceiverOutOfMemory(
        f"{call_text}: {why} Nothing else is affected: send less at once, or give it more memory."
    )
