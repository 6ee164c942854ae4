"""Copies of the items and results that share a message of `telegrad.rpc.map`.

A chunk is encoded when it is complete, but the program may change an item or a result before: it may reuse a buffer, or
keep a list and add to it. So a chunk has copies, and its results are those of single calls. The last one of a chunk
needs no copy: it is encoded at once.
"""

from types import CoroutineType
from typing import Any

from torch import Tensor

from telegrad.serialize.copies import IMMUTABLE, copy_by_message
from telegrad.serialize.tracebacks import is_of_signal_handler
from telegrad.streams.batches import SOLITARY, copy_item
from telegrad.worker import Worker
from telegrad.worker.calls.future import is_future

__all__ = ["Copier"]


class Copier:
    """Copies values for messages of one worker.

    Args:
        worker: The worker.
    """

    def __init__(self, worker: Worker) -> None:
        self._serializer = worker.messages.serializer

    def copy(self, value: Any) -> Any:
        """Return a value that later code of the program cannot change.

        Returns:
            The value itself if it is immutable, deferred, or cannot be copied: values with references, with tensors
            that require grad, and values that cannot be sent.
        """
        kind = type(value)
        if kind in IMMUTABLE or (kind is tuple and IMMUTABLE.issuperset(map(type, value))):
            return value
        if kind is CoroutineType or is_future(value):
            return value
        if kind is Tensor:  # cheaper than a message
            copied = copy_item(value)
            if copied is not SOLITARY:
                return copied
        try:
            return copy_by_message(value, self._serializer)
        except Exception as error:  # the message has the value itself, and raises what encoding it raises
            if is_of_signal_handler(error):
                raise
            return value
