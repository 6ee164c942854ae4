"""References to values on workers of the group."""

from collections.abc import Coroutine, Generator
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

import torch

from telegrad.errors import (
    NotInitialized,
    OwnerLost,
    RpcTimeout,
    RRefDeleted,
    RRefError,
    RRefNotPicklable,
    RRefTimeout,
    TelegradError,
    WorkerLost,
)
from telegrad.protocols.rref import RRefId
from telegrad.rref.awaiting import await_value
from telegrad.rref.backward import run_backward
from telegrad.rref.create import create
from telegrad.rref.creation import PendingCreation
from telegrad.rref.description import describe, global_id, missing_attribute
from telegrad.rref.proxy import UNSET, RRefProxy, stream_method
from telegrad.rref.value_type import request_type
from telegrad.serialize.tracebacks import strip_own_frames
from telegrad.streams.stream import PREFETCH, Stream
from telegrad.types import WorkerInfo
from telegrad.worker import Worker, current
from telegrad.worker.blocking import check_blocking
from telegrad.worker.calls.callables import read_attribute
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.default_worker import current_worker
from telegrad.worker.scope import remaining

__all__ = ["RRef"]

T_co = TypeVar("T_co", covariant=True)

_NO_KWARGS: dict[str, object] = {}


class RRef(Generic[T_co]):
    """A reference to a value on its owner, which may be this worker.

    The constructor refers to a value of this worker; `telegrad.rpc.remote` refers to the result of a function on
    another worker. The owner keeps the value while any worker refers to it. References travel as arguments and results
    of remote calls, also in containers and objects; otherwise they cannot be pickled. ``await rref`` is `to_here`
    without blocking.

    Args:
        value: A value of this worker, which becomes its owner. It is not copied.
        type_hint: For a scripted module, its interface; with another value it is an error.

    Attributes:
        id: Id of the value; the same for all references to it.
        owner_id: The owner's rank.

    Raises:
        RuntimeError: This process has not joined a group, or ``type_hint`` does not fit ``value``.

    Example::

        mine = rpc.RRef(torch.zeros(3))                      # of this worker
        model = rpc.remote("worker1", torch.nn.Linear, args=(3, 4))
        y = model.rpc_sync().forward(mine.local_value())     # a method of the value, run by its owner
        copy = model.to_here()
    """

    __slots__ = (
        "__orig_class__", "__weakref__", "_creation", "_fork", "_forked_by", "_generation", "_is_created",
        "_profiling_future", "_type_future", "_worker", "id", "owner_id",
    )  # fmt: skip

    def __init__(self, value: T_co, type_hint: object = None) -> None:
        worker = current_worker()
        if worker is None:
            raise NotInitialized(NotInitialized.AGENT)
        if isinstance(value, torch.jit.ScriptModule):
            if type_hint is None:
                raise RuntimeError(
                    "The RRef being created contains a ScriptModule, must provide its ModuleInterface type hint."
                )
        elif type_hint is not None:
            raise RuntimeError("The RRef being created does not contain a ScriptModule, so it takes no type_hint.")
        self._attach(worker, worker.references.own(value), worker.info.id, None)

    @classmethod
    def of(cls, worker: Worker, rref: RRefId, owner: int, fork: tuple[int, int] | None = None) -> Self:
        """Create the object of a reference that the protocol knows.

        The protocol has counted one handle for it.

        Args:
            worker: The worker that holds the reference.
            rref: The id of the value.
            owner: The id of the owner.
            fork: For a received reference: the sender, and the sender's number for this fork.
        """
        handle = cls.__new__(cls)
        handle._attach(worker, rref, owner, fork)
        return handle

    def _attach(self, worker: Worker, rref: RRefId, owner: int, fork: tuple[int, int] | None) -> None:
        self._worker = worker
        self.id: RRefId = rref
        self.owner_id: int = owner
        self._generation = worker.references.table.generation
        self._forked_by = worker.info.id
        self._fork: int | None = None  # the owner's handles have none
        if owner != worker.info.id:
            if fork is None:
                self._fork = worker.references.new_id()
            else:
                self._forked_by, self._fork = fork
        self._creation: PendingCreation | None = None  # on the worker that made the creating call
        self._is_created = False  # a reply showed that the value exists; the CREATED reply may still be unread
        self._type_future: CallFuture[Any] | None = None  # of the value's type, once it was requested

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.references.release_handle(self.id, self._generation)

    # ---- properties

    @property
    def worker(self) -> Worker:
        """Worker of this process that holds this reference."""
        return self._worker

    def owner(self) -> WorkerInfo:
        """Return the name and id of the worker that has the value."""
        return WorkerInfo(self._worker.members.name_of(self.owner_id), self.owner_id)

    def owner_name(self) -> str:
        """Return the name of the worker that has the value."""
        return self._worker.members.name_of(self.owner_id)

    def is_owner(self) -> bool:
        """Return whether this worker has the value."""
        return self.owner_id == self._worker.info.id

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner is known to count this reference.

        Always true on the owner. On other workers it is true once the owner has confirmed the reference, or has replied
        to a request about it: the value was fetched, or a method of it has run.
        """
        return self._is_created or self._worker.references.confirmed(self.id)

    def __repr__(self) -> str:
        return describe(self)

    # ---- the value

    def to_here(self, timeout: float = UNSET) -> T_co:
        """Fetch the value. Blocks until it exists.

        Args:
            timeout: Limit in seconds; -1 is the default of the worker, 0 no limit. On the owner, for the creation.

        Returns:
            The value itself on the owner, on other workers a copy, which the caller owns.

        Raises:
            RuntimeError: The creation of the value or this call timed out (`RpcTimeout`), or the reference has been
                released (`RRefDeleted`).
            OwnerLost: The owner is lost.
            Exception: The error of the function that creates the value, with its own type.
        """
        self._check()
        references, calls = self._worker.references, self._worker.calls
        limit = calls.default_timeout if timeout == UNSET else calls.timeout(timeout)
        if self.owner_id == self._worker.info.id:
            try:
                return self._wait_local(limit)
            except Exception as error:
                raise strip_own_frames(error)
        introduce = self._creation is None and not references.confirmed(self.id)
        try:
            value: T_co = calls.client.call(self.owner_id, None, (), _NO_KWARGS, limit, self, introduce)
        except TelegradError as error:
            raise self._on_error(error)
        self._is_created = True
        return value

    def get_attr(self, name: str, timeout: float = UNSET) -> Any:
        """Read an attribute of the value on its owner. Blocks until the value exists.

        Args:
            name: Name of the attribute or property, or a dotted path such as ``"layer.weight"``.
            timeout: Limit in seconds; -1 is the default of the worker, 0 no limit.

        Returns:
            The attribute: the object itself on the owner, on other workers a copy, which the caller owns.

        Raises:
            AttributeError: The value has no such attribute.
            Exception: The errors of `to_here`.

        Example::

            weight = rref.get_attr("weight")
        """
        worker = self._usable_worker()
        try:
            if self.owner_id == worker.info.id:
                return reduce(getattr, name.split("."), self._wait_local(worker.calls.timeout(timeout)))
            value = worker.rpc_sync(self.owner_id, read_attribute, (self, name), timeout=timeout)
        except TelegradError as error:
            raise self._on_error(error)
        self._is_created = True
        return value

    def local_value(self) -> T_co:
        """Return the value itself, on its owner. Blocks until it exists.

        The limit is the deadline of the handler's caller; outside of handlers there is no limit.

        Raises:
            RuntimeError: This worker is not the owner (`RRefError`), or the call timed out (`RpcTimeout`).
            Exception: The error of the function that creates the value, with its own type.
        """
        if not self.is_owner():
            fork = global_id(self._forked_by, self._fork or 0)
            raise RRefError(
                f"For UserRRef(rref_id={global_id(*self.id)}, fork_id={fork}), can't call localValue() on user"
                f" {self._worker.info}. Call it on owner {self.owner()}"
            )
        try:
            self._check()
            return self._wait_local(0)
        except Exception as error:
            raise strip_own_frames(error)

    def _wait_local(self, timeout: int) -> T_co:
        """Return the value on its owner, after waiting for it.

        Args:
            timeout: Limit in ns, 0 for none; the deadline of the running request counts as well.
        """
        owned = self._worker.references.owned(self.id)
        if not owned.ready:
            timeout = remaining(timeout, current.get())
            check_blocking("to_here()", "`await rref`")
            if not owned.wait(timeout / 1e9 if timeout else None):
                raise RpcTimeout(timeout / 1e9, f"the creation of {self!r}")
        value: T_co = owned.get()
        return value

    def _usable_worker(self) -> Worker:
        """Return the worker for calls about this reference, or raise an error."""
        self._check()
        worker = self._worker
        worker.require_open()
        return worker

    def _check(self) -> None:
        """Raise an error if the reference cannot be used."""
        self._mark_used()
        self._worker.references.check(self.id, self.owner_id)

    def _on_error(self, error: TelegradError) -> TelegradError:
        """Return an error of a use of the value, as the program gets it.

        It has no frames of Telegrad, and the loss of the owner is an `OwnerLost`.
        """
        if isinstance(error, RRefTimeout):  # if the creation has failed meanwhile, this worker knows the reason
            error = self._worker.references.unusable_reason(self.id, self.owner_id) or error
        if type(error) is WorkerLost and error.name == self.owner_name():
            error = OwnerLost(error.name, error.why, str(self.id), error.incarnation)
            error.__cause__ = None  # also hides the WorkerLost that it replaces
        return strip_own_frames(error)

    def _mark_used(self) -> None:
        """Record a use: the user of the reference gets a failure of the creation."""
        if self._creation is not None:
            self._creation.mark_used()

    def __await__(self) -> Generator[Any, None, T_co]:
        """Await the value, or the error of its creation; `to_here` without blocking."""
        return await_value(self).__await__()

    # ---- calls on the value

    def rpc_sync(self, timeout: float = UNSET) -> RRefProxy[Any]:
        """Return a proxy with methods that run on the owner and return their results.

        The methods raise the errors of `to_here` and `telegrad.rpc.rpc_sync`.

        Args:
            timeout: Limit in seconds for each call; -1 is the default of the worker, 0 no limit.

        Example::

            y = rref.rpc_sync(timeout=5).forward(x)          # the owner runs value.forward(x)
        """
        return RRefProxy(self, "sync", timeout)

    def rpc_async(self, timeout: float = UNSET) -> RRefProxy[CallFuture[Any]]:
        """Return a proxy with methods that run on the owner and return futures.

        Args:
            timeout: See `rpc_sync`.
        """
        return RRefProxy(self, "async", timeout)

    def call(self, timeout: float = UNSET) -> RRefProxy[Coroutine[Any, Any, Any]]:
        """Return a proxy with methods that are coroutines: ``await rref.call().f(x)``.

        Args:
            timeout: See `rpc_sync`. `telegrad.rpc.call` describes cancellation.
        """
        return RRefProxy(self, "call", timeout)

    def remote(self, timeout: float = UNSET) -> "RRefProxy[RRef[Any]]":
        """Return a proxy with methods that return references to their results.

        The results stay on the owner. Methods return at once, even if the value does not exist yet. With a timeout they
        wait that long for the value, and a method that it does not have raises `AttributeError` at the caller.

        Args:
            timeout: See `rpc_sync`.
        """
        return RRefProxy(self, "remote", timeout)

    def stream(self, timeout: float = UNSET, *, prefetch: int = PREFETCH) -> RRefProxy[Stream[Any]]:
        """Return a proxy with methods that return streams of their items.

        The methods are generators, or return iterators.

        Args:
            timeout: Limit in seconds for each wait for an item; -1 is the default of the worker, 0 no limit.
            prefetch: Most items that the owner produces ahead of the reader; at least 1.

        Example::

            class Corpus:
                def lines(self, start):
                    yield from (f"line {i}" for i in range(start, start + 3))

            corpus = rpc.remote("worker1", Corpus)
            print(list(corpus.stream().lines(7)))  # ['line 7', 'line 8', 'line 9']
        """
        return RRefProxy(self, "stream", timeout, partial(stream_method, prefetch))

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass with the value, a scalar tensor, as its root.

        The pass begins on the owner, also if another worker calls this.

        Args:
            dist_autograd_ctx_id: Id of the autograd context that gets the gradients. -1 runs ``tensor.backward()`` on
                the owner, which adds to ``.grad``. On other workers this needs the option ``plain_backward``, or
                `telegrad.autograd.plain`.
            retain_graph: See `telegrad.autograd.backward`.

        Raises:
            RuntimeError: The value is no tensor, or the id of a context is missing; or an error of
                `telegrad.autograd.backward`.
        """
        run_backward(self, dist_autograd_ctx_id, retain_graph)

    # ---- for telegrad and its drop-in

    def is_unknown(self) -> bool:
        """Return whether requests must introduce this reference to its owner."""
        return not self._worker.references.confirmed(self.id)

    @property
    def _scripted(self) -> bool:
        """Whether this worker had a scripted function create the value."""
        return self._creation is not None and self._creation.is_scripted

    def _start(self, function: object, timeout: float) -> CallFuture[Any]:
        """Start a call on the owner: of a function of the value, or for the value itself."""
        calls = self._worker.calls
        future: CallFuture[Any] = calls.client.start(
            self.owner_id, function, (), _NO_KWARGS, calls.timeout(timeout), self, self.is_unknown()
        )
        return future

    def _create(self, name: str, args: tuple[object, ...], kwargs: dict[str, object], timeout: int) -> "RRef[Any]":
        """Create a reference to the result of a method."""
        return create(RRef, self._worker, self.owner_id, name, args, kwargs, timeout, self)

    def _get_type(self, timeout: float = UNSET, blocking: bool = True) -> object:
        """Return the value's type, which is requested once.

        With ``blocking=False`` return a future of it.
        """
        future = self._type_future or request_type(self, timeout)
        return future.wait() if blocking else future

    def _get_future(self) -> CallFuture[None]:
        """Return the future of the creating call."""
        if self._creation is None:
            raise RRefError(f"{self!r} was not created by remote() on this worker, so its creation has no future.")
        return self._creation.future()

    def _get_profiling_future(self) -> object:
        if self._creation is not None and self._creation.is_intercepted:
            return self._creation.future()
        return getattr(self, "_profiling_future", None)

    def _set_profiling_future(self, future: object) -> None:
        self._profiling_future = future

    def _serialize(self) -> tuple[int, ...]:
        """Return the argument of `_deserialize`, for a pickler of the program."""
        worker = self._worker
        references = worker.references
        if references.closed:
            raise RRefDeleted("Cannot call fork an UserRRef after deletion.")
        self._check()
        return (worker.messages.pack_handle(self),)

    @staticmethod
    def _deserialize(data: tuple[int, ...]) -> "RRef[Any]":
        worker = current_worker()
        if worker is None:
            raise NotInitialized(NotInitialized.AGENT)
        handle: RRef[Any] = worker.messages.unpack_handle(data[0])
        return handle

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            raise missing_attribute(self, name)

    # ---- no copies outside of calls

    def __reduce_ex__(self, _: object) -> tuple[object, ...]:
        """Add the reference to the message that the program's pickler is encoding.

        Raises:
            RRefNotPicklable: There is no such message.
        """
        if self._worker.messages.pickler is None:
            raise RRefNotPicklable
        return RRef._deserialize, (self._serialize(),)

    def __copy__(self) -> NoReturn:
        raise RRefNotPicklable

    def __deepcopy__(self, _: object) -> NoReturn:
        raise RRefNotPicklable
