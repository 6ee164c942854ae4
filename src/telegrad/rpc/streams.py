"""Streams of a generator's items: `stream`."""

from collections.abc import AsyncIterable, Callable, Iterable
from typing import TypeAlias, TypeVar

from telegrad.errors import NotInitialized
from telegrad.rpc.calls import NOT_CALLABLE, Args, Kwargs
from telegrad.rpc.constants import UNSET_RPC_TIMEOUT
from telegrad.serialize.tracebacks import strip_own_frames
from telegrad.streams.stream import PREFETCH, Stream, open_stream
from telegrad.types import To
from telegrad.worker.default_worker import current_worker

__all__ = ["Items", "stream"]

T = TypeVar("T")

Items: TypeAlias = Iterable[T] | AsyncIterable[T]  # hints of generator functions may say so
"""Return type of a function that produces the items of a stream."""


def stream(
    to: To,
    func: Callable[..., Items[T]],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    prefetch: int = PREFETCH,
) -> Stream[T]:
    """Run a generator on another worker and return the stream of its items.

    Returns at once; the first item takes as long as five to six calls. The callee produces further items while the
    caller uses the first ones, and stops when the caller is slow. An item arrives as the result of a call would:
    tensors are copies, which the caller owns, and a later change of an item by the generator does not affect it.

    The generator runs in the state of the code that opened the stream: its autograd context, ``no_grad``, autocast, and
    the deadline of its handler. A thread of the callee runs a generator only while it produces; an asynchronous
    generator runs on the event loop of the callee.

    Args:
        to: a worker: its name, id or WorkerInfo. It may be this one.
        func: a generator function, an asynchronous generator function, or any callable that returns an iterator or an
            asynchronous iterator.
        args: its positional arguments, a tuple or list.
        kwargs: its keyword arguments.
        timeout: limit in seconds for each wait for an item; -1 is the worker's default, 0 no limit. A timeout closes
            the stream.
        prefetch: most items that are produced ahead of the reader, at least 1. Fewer are if they are large: about 32
            MiB of tensors.

    Returns:
        The stream, for ``for`` or ``async for``. Close it, or use it in a ``with`` block, if it may not be read to its
        end.

    Raises:
        RuntimeError: there is no such worker, or this process has not joined a group (`UnknownWorker`,
            `NotInitialized`).
        ValueError: ``prefetch`` is not a positive integer.
        SerializationError: an argument cannot be serialized.

    Reading the stream raises:
        RuntimeError: the callee is lost, or the timeout has expired (`WorkerLost`, `RpcTimeout`).
        TypeError: ``func`` did not return an iterator.
        SerializationError: an item cannot be serialized; the text has its number and type.
        StreamError: two threads read it at once, or it was closed.
        exceptions of ``func``: of their original type and of RemoteError, after the items before them.

    Example::

        def tokens(prompt):
            for word in prompt.split():
                yield word.upper()

        with rpc.stream("worker1", tokens, args=("the quick fox",)) as words:
            for word in words:
                print(word)
    """
    if not callable(func):
        raise TypeError(NOT_CALLABLE)
    worker = current_worker()
    if worker is None:
        raise NotInitialized
    try:
        return open_stream(worker, worker.members.resolve(to).id, func, args, kwargs, timeout, prefetch)
    except Exception as error:
        raise strip_own_frames(error)
