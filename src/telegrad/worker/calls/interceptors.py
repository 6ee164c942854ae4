"""Interceptors: functions around calls and around handlers.

The native client checks once per call whether `active` is empty. If it is not, `Calls.encode_slow` gets the call, and
the call runs through one chain (`telegrad.worker.calls.interception`):

1. the interceptors of the program (`Calls.interceptors`, see `telegrad.rpc.intercept`), for the calls that they see;
2. those of Telegrad for all workers of the process (`of_process`): the profiler;
3. those of Telegrad for one worker (`Calls.own_interceptors`): faults for tests.

The chain ends with a function that encodes and sends the call, or at the callee runs the handler. Interceptors of
Telegrad get a `ResolvedCall`, also for internal calls. Those of one worker get its one-way messages as well.
"""

import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MappingProxyType
from typing import Any, Protocol, TypeAlias

from torch.futures import Future

from telegrad.errors import TelegradError
from telegrad.serialize.program_pickler import Carried
from telegrad.worker.calls.callables import found, name_of, read_attribute
from telegrad.worker.calls.future import CallFuture, is_future
from telegrad.worker.calls.headers import NO_HEADERS, Headers

__all__ = [
    "PICKLER",
    "Carrier",
    "Find",
    "Given",
    "InterceptedCall",
    "Interceptor",
    "Interceptors",
    "Proceed",
    "Shown",
    "Split",
    "active",
    "around_handlers",
    "carrier_of",
    "carriers",
    "check_reply",
    "failed",
    "internal",
    "is_internal",
    "is_own",
    "of_process",
    "own",
    "rename_path",
    "run_chain",
    "shown_function",
    "steps",
    "succeeded",
    "switch",
]

active: dict[object, Any] = {}  # never replaced: the core holds this object
PICKLER = "pickler"  # of all workers: a telegrad.serialize.program_pickler.BodyPickler


def switch(key: object, interceptor: object) -> None:
    """Set an interceptor, or remove it with None."""
    if interceptor is None:
        active.pop(key, None)
    else:
        active[key] = interceptor


@dataclass(frozen=True, slots=True)
class InterceptedCall:
    """Call as an interceptor sees it.

    Immutable: ``dataclasses.replace(call, timeout=1.0)`` returns a changed call for ``proceed``. The function, the
    arguments, and at the caller the timeout, the delay and the headers may be changed, all else is for information.

    Attributes:
        kind: at the caller ``"sync"``, ``"async"`` (also `telegrad.rpc.call` and `telegrad.rpc.multicast`),
            ``"remote"`` or ``"to_here"``; at the callee ``"call"`` or ``"remote"``. At both, ``"stream"`` when a stream
            is opened, ``"map"`` for a chunk of `telegrad.rpc.map`, and ``"retry"`` for an attempt of a call with
            `telegrad.rpc.Retry`.
        peer: name of the other worker.
        function: the function. At the caller of a method of a reference the method's name, and None for ``to_here``.
        args: positional arguments. Of a chunk: one, the list of its items.
        kwargs: keyword arguments.
        timeout: at the caller the limit in seconds, at the callee the seconds that are left; 0 is no limit, and a
            negative one has expired. When a stream is opened, of the wait for its first item; 0 at the caller, because
            the reader limits its waits.
        receiver: at the caller, the `RRef` whose value the call is about; else None.
        delay: at the caller, seconds after which the request is sent; they count towards the timeout. It is encoded at
            once. For tests of slow networks.
        headers: names with texts or bytes that travel with the request, 64 KiB at most: what interceptors of the
            caller add for those of the callee. The handler does not get them.

    Example::

        import dataclasses

        def shorter(call, proceed):
            return proceed(dataclasses.replace(call, timeout=1.0))

        with rpc.intercept(client=shorter):
            rpc.rpc_sync("worker1", max, args=(1, 2))
    """

    kind: str
    peer: str
    function: object
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    timeout: float = 0.0
    receiver: Any = None
    delay: float = 0.0
    headers: Headers = field(default_factory=lambda: NO_HEADERS)

    @property
    def name(self) -> str:
        """Return the name of the function or method, or ``"to_here"``."""
        if self.function is None:
            return "to_here"
        return self.function if isinstance(self.function, str) else name_of(self.function)


Given: TypeAlias = Sequence[Any]
"""Arguments of a carrier."""

Find: TypeAlias = Callable[[Any], Any]
"""Returns the function of a name in a message."""

Shown: TypeAlias = tuple[object, Sequence[Any], Mapping[str, Any]]
"""Function of the program, or its name, and its arguments."""

Split: TypeAlias = tuple[Carried, Sequence[Any], Mapping[str, Any]]
"""Arguments for Telegrad, and the positional and keyword ones for the program's pickler."""


class Carrier(Protocol):
    """Function of Telegrad that runs a function of the program.

    Its arguments contain those of the program's function, which interceptors see.
    """

    kind: str
    """Kind of the calls."""

    paths: Mapping[str, str]
    """Path of each part of the program's call in the carrier's arguments, and its path in that call."""

    def show(self, args: Given, find: Find = ..., /) -> Shown:
        """Return the program's function and its arguments.

        Args:
            args: Arguments of the carrier.
            find: Returns the function of a name; at the callee `callables.callee_of`.
        """

    def change(
        self, args: Given, function: object, values: Sequence[object], named: Mapping[str, object], /
    ) -> tuple[object, ...]:
        """Return the arguments with another function, or name, and its arguments."""

    def split(self, args: Given, /) -> Split:
        """Return Telegrad's arguments, and those that the program's pickler gets."""

    def is_reply(self, value: object, /) -> bool:
        """Return whether a value may be the result of the carrier."""


class CallCarrier:
    """Carrier with the arguments ``(first, second, function, args, kwargs)``.

    Args:
        kind: Kind of the calls.
    """

    paths: Mapping[str, str] = MappingProxyType({"args[3]": "args", "args[4]": "kwargs", "args[2]": "the function"})

    def __init__(self, kind: str) -> None:
        self.kind: str = kind

    def show(self, args: Given, find: Find = found, /) -> Shown:
        *_, function, values, named = args
        return find(function), values, named

    def change(
        self, args: Given, function: object, values: Sequence[object], named: Mapping[str, object], /
    ) -> tuple[object, ...]:
        *before, _, _, _ = args
        return (*before, function, tuple(values), dict(named))

    def split(self, args: Given, /) -> Split:
        *head, values, named = args
        return Carried(tuple(head), (), False), values, named

    def is_reply(self, _: object, /) -> bool:
        return True


carriers: dict[object, Carrier] = {}
around_handlers: set[str] = {__file__}  # files of functions of Telegrad that call handlers
own: set[object] = {read_attribute}  # functions of Telegrad that do not use the pickler of the program
internal: set[object] = {type}  # functions of Telegrad that interceptors do not see
steps: dict[object, Callable[[Given], str]] = {}  # names of calls of these in profiles, by their arguments


def carrier_of(function: object) -> Carrier | None:
    """Return the carrier of a function; None for functions of the program."""
    return carriers.get(function) if type(function) is FunctionType else None  # others may not be hashable


def shown_function(function: object, args: Given) -> object:
    """Return the program's function of a call, or a text, as profiles show it."""
    carrier = carrier_of(function)
    if carrier is not None:
        return carrier.show(args)[0]
    step = steps.get(function) if type(function) is FunctionType else None
    return function if step is None else step(args)


def is_internal(function: object) -> bool:
    """Return whether interceptors do not see the calls of a function."""
    return function is type or (type(function) is FunctionType and function in internal)


def is_own(function: object) -> bool:
    """Return whether a function does not use the pickler of the program."""
    return type(function) is FunctionType and function in own


def rename_path(carrier: Carrier, error: BaseException) -> None:
    """Name the program's own argument in an error about an argument of a carrier."""
    paths, (text, *rest) = carrier.paths, error.args or ("",)
    found = next((path for path in paths if f"(at {path}" in str(text)), None)
    if found is not None:
        error.args = (str(text).replace(f"(at {found}", f"(at {paths[found]}", 1), *rest)


def check_reply(carrier: Carrier | None, call: InterceptedCall, value: object) -> None:
    """Check that the result of a carrier is that of `proceed`.

    Raises:
        TelegradError: An interceptor has replaced the result of a stream or a chunk.
    """
    if carrier is not None and not carrier.is_reply(value):
        raise TelegradError(
            f"an interceptor replaced the result of {call.name}, a call of kind {carrier.kind!r}. Its result is"
            " Telegrad's own: return what proceed(call) returns, or raise an error."
        )


class Proceed(Protocol):
    """Continuation of an interceptor: the next one, or the call itself.

    Example::

        def through(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
            return proceed(call)

        with rpc.intercept(client=through):
            rpc.rpc_sync("worker1", max, args=(1, 2))
    """

    def __call__(self, call: InterceptedCall, /) -> "Future[Any]":
        """Go on with the call, and return the future of its result."""


class Interceptor(Protocol):
    """Function around every call: see `telegrad.rpc.intercept`.

    Example::

        def only(name: str) -> rpc.Interceptor:
            def check(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
                if call.name != name:
                    raise PermissionError(f"{call.peer} may not call {call.name}")
                return proceed(call)

            return check

        rpc.intercept(server=only("max"))
    """

    def __call__(self, call: InterceptedCall, proceed: Proceed, /) -> object:
        """Return the future of the result, or the result itself."""


class Interceptors:
    """Interceptors of one side of a worker; the first one is the outermost.

    Args:
        changed: Called after each change.
    """

    def __init__(self, changed: Callable[[], object]) -> None:
        self.chain: tuple[Interceptor, ...] = ()
        self._changed = changed
        self._lock = threading.Lock()

    def add(self, interceptor: Interceptor) -> None:
        """Add an interceptor inside the others."""
        with self._lock:
            self.chain = (*self.chain, interceptor)
            self._changed()

    def remove(self, interceptor: Interceptor) -> None:
        """Remove an interceptor; calls that it has already seen go on."""
        with self._lock:
            chain = list(self.chain)
            for index in range(len(chain) - 1, -1, -1):
                if chain[index] is interceptor:
                    del chain[index]
                    break
            self.chain = tuple(chain)
            self._changed()

    def clear(self) -> None:
        """Remove all."""
        with self._lock:
            self.chain = ()
            self._changed()


def _on_change_of_process() -> None:
    switch("of_process", of_process.chain or None)


of_process: Interceptors = Interceptors(_on_change_of_process)
"""Interceptors of Telegrad for the calls of all workers of this process."""


def run_chain(chain: tuple[Interceptor, ...], call: InterceptedCall, last: Proceed) -> object:
    """Run a call through interceptors.

    Returns:
        What the outermost interceptor returns: a future, or the result.

    Raises:
        TypeError: An interceptor has returned a coroutine.
        Exception: Whatever an interceptor raises.
    """
    if not chain:
        return last(call)
    first, rest = chain[0], chain[1:]

    def proceed(call: InterceptedCall, /) -> Future[Any]:
        result = run_chain(rest, call, last)
        return result if is_future(result) else succeeded(result)

    result = first(call, proceed)
    if isinstance(result, Coroutine):
        result.close()
        raise TypeError(
            f"the interceptor {name_of(first)} returned a coroutine. An interceptor is a plain function: return"
            " proceed(call), which is a future, and use its then() for what follows."
        )
    return result


def succeeded(value: object) -> CallFuture[Any]:
    """Return a future that is done."""
    future: CallFuture[Any] = CallFuture._of()
    future._succeed(value)
    return future


def failed(error: BaseException) -> CallFuture[Any]:
    """Return a future that has failed; it logs nothing if the program ignores it."""
    future: CallFuture[Any] = CallFuture._of(is_read=True)
    future._fail(error)
    return future
