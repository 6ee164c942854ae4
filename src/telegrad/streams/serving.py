"""Functions that the caller of a stream runs on the callee.

They are ordinary calls, so tensors, references, autograd contexts and errors of items are those of results.
"""

from collections.abc import Callable, Mapping, Sequence
from types import GeneratorType
from typing import Any

from telegrad.streams import async_producer, producer
from telegrad.streams.async_producer import AsyncProducer
from telegrad.streams.batches import NO_STREAM, Batch
from telegrad.streams.producer import Producer
from telegrad.streams.service import AnyProducer, Streams
from telegrad.worker import Worker, current
from telegrad.worker.calls.callables import callee_of, found, name_of, run
from telegrad.worker.calls.interceptors import (
    CallCarrier,
    Find,
    Given,
    Shown,
    around_handlers,
    carriers,
    internal,
    steps,
)

__all__ = ["close", "flush", "open_function", "open_method", "pull"]


def open_function(
    caller: int,
    number: int,
    function: bytes | Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> object:
    """Open a stream and return its first item.

    Args:
        caller: Id of the caller.
        number: The caller's number for the stream.
        function: The function, or its name.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        A batch, or a coroutine that returns one.

    Raises:
        TypeError: The function does not return an iterator.
        Exception: Whatever the function or the first step of the iterator raises.
    """
    return _open(caller, number, callee_of(function), args, kwargs)


def open_method(
    value: object,
    caller: int,
    number: int,
    name: str | Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> object:
    """Open a stream of a referenced value's method, like `open_function`.

    An interceptor of the callee passes the method, or another function, instead of its name.
    """
    return _open(caller, number, _method_of(value, name), args, kwargs)


def _method_of(value: object, name: str | Callable[..., object]) -> Any:
    """Return a method of a referenced value, if this worker exposes it."""
    if not isinstance(name, str):
        return callee_of(name)
    scope = current.get()
    assert scope is not None
    return scope.worker.handlers.exposure.method_of(value, name)


def _open(
    caller: int, number: int, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    scope = current.get()
    assert scope is not None
    streams, key, label = Streams.of(scope.worker), (caller, number), name_of(function)
    iterator: Any = run(function, args, kwargs)
    kind = type(iterator)
    producer: AnyProducer
    if kind is not GeneratorType and hasattr(kind, "__anext__"):
        producer = AsyncProducer(key, iterator, label, scope, streams.remove)
    elif hasattr(kind, "__next__"):
        producer = Producer(key, iterator, label, scope, streams.remove)
    else:
        raise _not_an_iterator(iterator, label, scope.worker)
    is_canceled = scope.worker.engine.is_canceled
    streams.add(producer, is_canceled(scope.connection, scope.call))
    if is_canceled(scope.connection, scope.call):
        producer.close()  # the notification of the reader's close may have come before the stream was open
    return producer.pull(1)


def _not_an_iterator(result: Any, label: str, worker: Worker) -> TypeError:
    kind = type(result).__qualname__
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    if hasattr(result, "__await__"):
        close = getattr(result, "close", None)
        if close is not None:
            close()
        advice = "A stream needs a generator function: use `yield` in it"
    else:
        advice = "Make it a generator function (use `yield`), or return iter(...) of the items"
    return TypeError(f"{label} on worker {worker.info.name} returned {article} {kind}, not an iterator. {advice}.")


def pull(caller: int, number: int, credit: int) -> object:
    """Return the next items of a stream: a batch, or a coroutine that returns one."""
    producer = _streams().producers.get((caller, number))
    return NO_STREAM if producer is None else producer.pull(credit)


def flush(caller: int, number: int) -> object:
    """Return the items that a running `pull` holds back."""
    producer = _streams().producers.get((caller, number))
    return None if producer is None else producer.flush()


def close(caller: int, number: int, is_opening: bool) -> None:
    """Close a stream; do nothing if it has ended.

    Args:
        caller: Id of the caller.
        number: The caller's number for the stream.
        is_opening: The request that opens the stream may arrive later.
    """
    _streams().close_one((caller, number), is_opening)


def _streams() -> Streams:
    scope = current.get()
    assert scope is not None
    return Streams.of(scope.worker)


# ---- as interceptors and profiles see them


class _Open(CallCarrier):
    """Opening of a stream, as interceptors see it: a call of the generator function."""

    def is_reply(self, value: object, /) -> bool:
        return isinstance(value, tuple) and len(value) == len(Batch._fields) and isinstance(value[-1], list)


class _OpenMethod(_Open):
    """Opening of a stream of a method.

    At the callee, interceptors see the method itself.
    """

    def show(self, args: Given, find: Find = found, /) -> Shown:
        *_, name, values, named = args
        return (_method_of(args[0], str(name)) if _is_at_callee(args) else name), values, named

    def change(
        self, args: Given, function: object, values: Sequence[object], named: Mapping[str, object], /
    ) -> tuple[object, ...]:
        if not _is_at_callee(args) and not isinstance(function, str):
            raise ValueError(
                f"an interceptor changed the method of a stream to {function!r}; it may change it to the name of"
                " another method"
            )
        return super().change(args, function, values, named)


def _is_at_callee(args: Given) -> bool:
    """Return whether these arguments of `open_method` are those of the callee.

    The caller passes the value as the receiver.
    """
    return len(args) == 6


def _step_of(args: Given) -> str:
    """Return the name of a request for items of a stream, at its caller."""
    receiver = _streams().receivers.get(args[1])
    return f"a step of {'a stream' if receiver is None else receiver.label}"


carriers[open_function] = _Open("stream")
carriers[open_method] = _OpenMethod("stream")
internal.update((pull, flush, close))
steps.update(dict.fromkeys((pull, flush), _step_of))
around_handlers.update((__file__, producer.__file__, async_producer.__file__))
