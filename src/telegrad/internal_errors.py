"""Internal errors in threads that have to continue after them."""

import logging
import sys
import traceback
from contextlib import suppress

__all__ = ["log_internal_error"]

logger: logging.Logger = logging.getLogger("telegrad")


def log_internal_error(text: str, *arguments: object) -> None:
    """Log the exception that is being handled. Raises nothing.

    What the program's handlers and filters of the log raise is printed: to log it would run them again, and to raise it
    would end the thread.

    Args:
        text: Says where the error was, with places for the arguments.
        arguments: As of ``logging.Logger.exception``.
    """
    try:
        logger.exception(f"{text}; please report it", *arguments)
    except BaseException:
        with suppress(Exception):  # closed streams
            print(f"{text % arguments}, which cannot be logged: {traceback.format_exc()}", file=sys.stderr)
