"""The program's part in every call: interceptors, picklers and types."""

import dataclasses
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from telegrad.errors import TelegradError
from telegrad.serialize.plain_data import is_own_type, pack_dataclass, unpack_dataclass
from telegrad.serialize.program_pickler import BodyPickler, Pickler
from telegrad.worker.calls.callables import require_plain_function
from telegrad.worker.calls.interceptors import Interceptor
from telegrad.worker.default_worker import open_worker

__all__ = ["Registration", "intercept", "register_type", "use_pickler"]

T = TypeVar("T")

_REMEDY = "Return proceed(call), which is a future, and use its then() for what follows."


class Registration:
    """Interceptor, pickler or type in use, until it is removed.

    Also a context manager, which removes it at the end of the block. Removing it again does nothing; it ends with its
    worker at the latest.

    Example::

        registration = rpc.intercept(client=lambda call, proceed: proceed(call))
        registration.remove()
    """

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove: Callable[[], None] | None = remove

    def remove(self) -> None:
        """End the use. Calls that have begun go on as they began."""
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def intercept(client: Interceptor | None = None, server: Interceptor | None = None) -> Registration:
    """Run a function around every call of this worker, or around every request to it.

    An interceptor is a function of the call and of the continuation: ``interceptor(call, proceed)``. ``proceed(call)``
    starts the call (as ``server``: runs the handler) and returns the future of its result. The interceptor returns this
    future, one that it derives with ``then``, or the result itself. It may change the call with
    ``dataclasses.replace``, call ``proceed`` again to retry, return a result without it, or raise. It must not block in
    callbacks of the future.

    At the caller, it runs in the calling thread and sees ``rpc_sync``, ``rpc_async``, ``call``, ``remote``, `multicast`
    (one call per worker), `telegrad.rpc.map` (one per chunk), `telegrad.rpc.stream` (one per stream), methods of
    references, and ``to_here``. At the callee, it runs in the handler's thread. There, the future of an ``async def``
    handler and of one under ``async_execution`` is done when the result is, the future of any other handler at once.

    A stream and a chunk of a map are seen with the function of the program; what ``proceed`` returns for them is
    Telegrad's own, to be returned unchanged. Telegrad's internal messages are not intercepted. The timeout of a call
    limits the wait for the future that the interceptors return, and canceling the call cancels what they have begun.

    Interceptors of one worker nest: the first registration is the outermost. While there are any, calls take the slow
    path, as if profiled.

    Args:
        client: interceptor of the calls that this worker makes.
        server: interceptor of the requests that this worker runs.

    Returns:
        The registration, which is also a context manager.

    Raises:
        ValueError: neither interceptor is given.
        TypeError: an interceptor is not callable, or is an ``async def``.
        RuntimeError: this process has not joined a group (`NotInitialized`).

    Example::

        def log_duration(call, proceed):
            began = time.monotonic()
            future = proceed(call)
            future.add_done_callback(lambda _: print(call.name, call.peer, time.monotonic() - began))
            return future

        with rpc.intercept(client=log_duration):
            rpc.rpc_sync("worker1", max, args=(1, 2))
    """
    if client is None and server is None:
        raise ValueError("rpc.intercept needs an interceptor: pass client=, server=, or both")
    for interceptor in (client, server):
        if interceptor is not None:
            require_plain_function(interceptor, "an interceptor", _REMEDY)
    worker = open_worker()
    pairs = ((worker.calls.interceptors, client), (worker.handlers.interceptors, server))
    for interceptors, interceptor in pairs:
        if interceptor is not None:
            interceptors.add(interceptor)

    def remove() -> None:
        for interceptors, interceptor in pairs:
            if interceptor is not None:
                interceptors.remove(interceptor)

    return Registration(remove)


def use_pickler(pickler: Pickler) -> Registration:
    """Encode arguments and results of this worker's calls with the program's pickler.

    ``pickler.serialize(value)`` returns bytes and a list of tensors, ``pickler.deserialize(data, tensors)`` the value
    again. For a request the value is ``(args, kwargs)``, for a reply the result. The tensors travel as in other calls:
    in shared memory, and recorded by distributed autograd. References in the value are pickled by any pickler that uses
    ``pickle``.

    Both workers of a call need a pickler: the caller's encodes the request, the callee's decodes it and encodes the
    reply. Requests of a worker without one are answered as usual. Functions, exceptions and Telegrad's internal
    messages are not affected. While there is a pickler, calls take the slow path.

    Args:
        pickler: an object with both methods, which any thread may call.

    Returns:
        The registration, which is also a context manager.

    Raises:
        TypeError: the pickler lacks one of the methods.
        RuntimeError: this worker already has a pickler, or has the option ``allow_pickle=False``; or this process has
            not joined a group (`NotInitialized`).

    Example::

        import zlib

        class Compressed:
            def serialize(self, value):
                return zlib.compress(pickle.dumps(value)), []

            def deserialize(self, data, tensors):
                return pickle.loads(zlib.decompress(data))

        rpc.use_pickler(Compressed())  # on every worker
    """
    for method in ("serialize", "deserialize"):
        if not callable(getattr(pickler, method, None)):
            raise TypeError(f"a pickler needs a method {method}, and {pickler!r:.100} has none")
    worker = open_worker()
    used = worker.messages.pickler
    if used is not None:
        raise TelegradError(
            f"worker {worker.info.name} already uses the pickler {used.name}: remove its registration first"
        )
    if not worker.messages.gate.is_open:
        raise TelegradError(
            f"worker {worker.info.name} can use no pickler: its messages contain no pickles (option allow_pickle=False)"
        )
    in_use = BodyPickler(pickler)
    worker.calls.use_pickler(in_use)

    def remove() -> None:
        if worker.messages.pickler is in_use:
            worker.calls.use_pickler(None)

    return Registration(remove)


def register_type(
    kind: type[T], pack: Callable[[T], Any] | None = None, unpack: Callable[[Any], T] | None = None
) -> Registration:
    """Set how objects of exactly this type are sent by this worker.

    With the option ``allow_pickle=False``, the receiver has to register the type as well, and uses its own ``unpack``.

    Args:
        kind: a class of the program or of a library, without its subclasses. Telegrad, PyTorch and Python encode their
            own types, as in Telegrad's own messages: built-in types and exceptions, and functions.
        pack: returns for an object what is sent instead: any value that can be sent. Its tensors travel as in other
            calls. A dataclass needs neither function: its fields and other attributes are sent. As with pickle, its
            constructor and ``__post_init__`` do not run again; pass functions if they have to check what arrives.
        unpack: returns an object for that value, on the receiver; sent as any function is, by its name if it has one.
            The receiver needs no registration, except to send such objects itself.

    Returns:
        The registration, which is also a context manager.

    Raises:
        ValueError: the type is already registered, or is one that Telegrad encodes itself.
        TypeError: ``kind`` is not a class, a function is not callable, or both are missing for no dataclass.
        RuntimeError: this process has not joined a group (`NotInitialized`).

    Example::

        class Image:
            def __init__(self, pixels):
                self.pixels = pixels

        rpc.register_type(Image, lambda image: image.pixels, Image)
    """
    packs: Any = pack
    unpacks: Any = unpack
    if pack is None and unpack is None and dataclasses.is_dataclass(kind):
        packs, unpacks = pack_dataclass, partial(unpack_dataclass, kind)
    if not all((isinstance(kind, type), callable(packs), callable(unpacks))):
        raise TypeError(f"rpc.register_type takes a class and two functions, and got {kind!r}, {pack!r}, {unpack!r}")
    worker = open_worker()
    serializer = worker.messages.serializer
    if is_own_type(kind) or kind in serializer.extensions:
        package = str(kind.__module__).partition(".")[0]
        raise ValueError(
            f"Telegrad encodes {kind.__qualname__} itself, as a type of {package}; register a class of the program"
        )
    if kind in serializer.reducers:
        raise ValueError(f"{kind.__qualname__} is already registered on worker {worker.info.name}")

    def reduce(each: T) -> tuple[object, ...]:
        return unpacks, (packs(each),)

    serializer.register_reducer(kind, reduce)
    serializer.plain.register(kind, packs, unpacks)

    def remove() -> None:
        del serializer.reducers[kind]
        serializer.plain.remove(kind)

    return Registration(remove)
