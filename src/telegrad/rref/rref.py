"""A reference to a value that lives on some worker of the group."""

import weakref
from collections.abc import Coroutine, Generator
from typing import Any, Generic, NoReturn, TypeVar

import torch

from telegrad.errors import (
    NotInitialized,
    OwnerLost,
    RpcTimeout,
    RRefDeleted,
    RRefError,
    RRefNotPicklable,
    TelegradError,
    WorkerLost,
)
from telegrad.protocols.rref import RRefId
from telegrad.rref.awaiting import arrival
from telegrad.rref.backward import run_backward
from telegrad.rref.creation import PendingCreation
from telegrad.rref.description import describe
from telegrad.rref.proxy import UNSET, RRefProxy
from telegrad.serialize.tracebacks import strip_own_frames
from telegrad.types import WorkerInfo
from telegrad.worker import Worker, current
from telegrad.worker.calls.callables import read_attribute
from telegrad.worker.calls.future import NO_DEVICES, CallFuture
from telegrad.worker.default_worker import current_worker
from telegrad.worker.scope import remaining
from telegrad.worker.serving.event_loop import blocking_in_loop

__all__ = ["RRef"]

T = TypeVar("T")

_NO_KWARGS: dict[str, Any] = {}


def _global_id(created_on: int, local_id: int) -> str:
    return f"GloballyUniqueId(created_on={created_on}, local_id={local_id})"


class RRef(Generic[T]):
    """A reference to a value on its owner, which may be this worker.

    Made of a value of this worker, or by `telegrad.rpc.remote` of what a function returns elsewhere. The owner keeps
    the value while any worker refers to it. References travel as arguments and results of remote calls, in containers
    and objects as well; elsewhere they cannot be pickled. ``await rref`` is `to_here` without blocking.

    Args:
        value: a value of this worker, which becomes its owner. It is not copied.
        type_hint: for a scripted module, its interface; with another value it is an error.

    Attributes:
        id: of the value; the same for all references to it.
        owner_id: the owner's rank.

    Raises:
        RuntimeError: this process has not joined a group, or ``type_hint`` does not fit ``value``.

    Example::

        mine = rpc.RRef(torch.zeros(3))                      # of this worker
        model = rpc.remote("worker1", torch.nn.Linear, args=(3, 4))
        y = model.rpc_sync().forward(mine.local_value())     # a method of the value, run by its owner
        copy = model.to_here()
    """

    __slots__ = (
        "__orig_class__", "__weakref__", "_creation", "_exists", "_fork", "_forked_by", "_generation", "_profiling",
        "_scripted", "_type", "_worker", "id", "owner_id",
    )  # fmt: skip

    def __init__(self, value: T, type_hint: Any = None) -> None:
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
    def of(cls, worker: Worker, rref: RRefId, owner: int, fork: tuple[int, int] | None = None) -> "RRef[Any]":
        """Make the object of a reference that the protocol knows.

        It takes over one handle.

        Args:
            worker: holds the reference.
            rref: the id of the value.
            owner: the id of the owner.
            fork: of a reference that has arrived: the worker that sent it, and that worker's number for this fork.
        """
        handle: RRef[Any] = cls.__new__(cls)
        handle._attach(worker, rref, owner, fork)
        return handle

    def _attach(self, worker: Worker, rref: RRefId, owner: int, fork: tuple[int, int] | None) -> None:
        self._worker = worker
        self.id: RRefId = rref
        self.owner_id: int = owner
        self._generation = worker.references.table.generation
        self._forked_by = worker.info.id
        self._fork: int | None = None  # the owner's is none
        if owner != worker.info.id:
            if fork is None:
                self._fork = worker.references.new_id()
            else:
                self._forked_by, self._fork = fork
        self._creation: PendingCreation | None = None  # where this worker made the call that makes it
        self._exists = False  # it is known here that there is a value, whether the word of its creation has come or not
        self._type: Any = None
        self._profiling: Any = None
        self._scripted = False

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.references.release_handle(self.id, self._generation)

    # ---- about it

    @property
    def worker(self) -> Worker:
        """The worker of this process that holds this reference."""
        return self._worker

    def owner(self) -> WorkerInfo:
        """Return the name and id of the worker that has the value."""
        return WorkerInfo(self._worker.name_of(self.owner_id), self.owner_id)

    def owner_name(self) -> str:
        """Return the name of the worker that has the value."""
        return self._worker.name_of(self.owner_id)

    def is_owner(self) -> bool:
        """Tell whether this worker has the value."""
        return self.owner_id == self._worker.info.id

    def confirmed_by_owner(self) -> bool:
        """Tell whether the owner is known to count this reference.

        Always true on the owner. Elsewhere it is false until the owner has confirmed it, or has answered otherwise
        about this reference: the value was fetched, or a method of it has run.
        """
        return self._exists or self._worker.references.confirmed(self.id)

    def __repr__(self) -> str:
        return describe(self)

    # ---- the value

    def to_here(self, timeout: float = UNSET) -> T:
        """Bring the value to this worker. Blocks until there is one.

        Args:
            timeout: seconds; -1 is the default of the worker, 0 no limit. On the owner, for the value to be made.

        Returns:
            The value itself on the owner, elsewhere a copy, which the caller owns.

        Raises:
            RuntimeError: the creation of the value or this call timed out (`RpcTimeout`), or the reference has been
                given up (`RRefDeleted`).
            OwnerLost: the owner is gone.
            what the function that made the value raised, as its own type.
        """
        self._check()
        worker = self._worker
        references, calls = worker.references, worker.calls
        within = calls.default_timeout if timeout == UNSET else calls.timeout(timeout)
        if self.owner_id == worker.info.id:
            try:
                return self._local(within)
            except Exception as error:
                raise strip_own_frames(error)
        introduce = self._creation is None and not references.confirmed(self.id)
        try:
            fetched = calls.client.call(self.owner_id, None, (), _NO_KWARGS, within, self, introduce)
        except TelegradError as error:
            raise self._on_notified(error)
        self._exists = True
        value: T = fetched
        return value

    def get_attr(self, name: str, timeout: float = UNSET) -> Any:
        """Read an attribute of the value, on its owner. Blocks until there is a value.

        Args:
            name: of the attribute or property; dots lead further, as in ``"layer.weight"``.
            timeout: seconds; -1 is the default of the worker, 0 no limit.

        Returns:
            What the attribute holds: the object itself on the owner, elsewhere a copy, which the caller owns.

        Raises:
            AttributeError: there is none of this name.
            and as `to_here`.

        Example::

            weight = rref.get_attr("weight")
        """
        worker = self.checked()
        try:
            value = worker.rpc_sync(self.owner_id, read_attribute, (self, name), timeout=timeout)
        except TelegradError as error:
            raise self._on_notified(error)
        self._exists = True
        return value

    def local_value(self) -> T:
        """Return the value itself, on its owner. Blocks while it is being made.

        In a handler it waits no longer than the handler's caller does, elsewhere without a limit.

        Raises:
            RuntimeError: this is not the owner (`RRefError`), or the time is over (`RpcTimeout`).
            what the function that made the value raised, as its own type.
        """
        if not self.is_owner():
            fork = _global_id(self._forked_by, self._fork or 0)
            raise RRefError(
                f"For UserRRef(rref_id={_global_id(*self.id)}, fork_id={fork}), can't call localValue() on user"
                f" {self._worker.info}. Call it on owner {self.owner()}"
            )
        try:
            self._check()
            return self._local(0)
        except Exception as error:
            raise strip_own_frames(error)

    def _local(self, timeout: int) -> T:
        """The value on its owner; waits for it no longer than `timeout` ns (0: no limit) and what the running request
        has left."""
        owned = self._worker.references.owned(self.id)
        if not owned.ready:
            timeout = remaining(timeout, current.get())
            with blocking_in_loop():
                in_time = owned.wait(timeout / 1e9 if timeout else None)
            if not in_time:
                raise RpcTimeout(timeout / 1e9, f"the making of {self!r}")
        value: T = owned.get()
        return value

    def checked(self) -> Worker:
        """The worker that calls about it go through; raises what stands against them."""
        self._check()
        worker = self._worker
        if worker.closed:
            raise NotInitialized
        return worker

    def _check(self) -> None:
        if self._creation is not None:
            self._creation.used()
        self._worker.references.check(self.id, self.owner_id)

    def _on_notified(self, error: TelegradError) -> TelegradError:
        """The error of a use of the value, as its caller sees it: without Telegrad's own frames, and the loss of the
        owner as that of the value."""
        if type(error) is WorkerLost and error.name == self.owner_name():
            error = OwnerLost(error.name, error.why, str(self.id))
            error.__cause__ = None  # which also hides the WorkerLost that it stands for
        return strip_own_frames(error)

    def _mark_used(self) -> None:
        """Whoever uses it, here or elsewhere, hears of a failure to make the value."""
        if self._creation is not None:
            self._creation.used()

    def __await__(self) -> Generator[Any, None, T]:
        """``await rref`` is `to_here` without blocking: the value, when there is one, or what making it raised."""
        return arrival(self).__await__()

    # ---- calls on the value

    def rpc_sync(self, timeout: float = UNSET) -> RRefProxy[Any]:
        """Return a proxy whose methods run on the owner and bring their result.

        Args:
            timeout: seconds for each call; -1 is the default of the worker, 0 no limit.

        Raises:
            nothing here. Methods raise as `to_here` and `telegrad.rpc.rpc_sync` do.

        Example::

            y = rref.rpc_sync(timeout=5).forward(x)          # value.forward(x), run by the owner
        """
        return RRefProxy(self, "sync", timeout)

    def rpc_async(self, timeout: float = UNSET) -> RRefProxy[CallFuture[Any]]:
        """Return a proxy whose methods run on the owner and return futures.

        Args:
            timeout: as of `rpc_sync`.
        """
        return RRefProxy(self, "async", timeout)

    def call(self, timeout: float = UNSET) -> RRefProxy[Coroutine[Any, Any, Any]]:
        """Return a proxy whose methods are coroutines: ``await rref.call().f(x)``.

        Args:
            timeout: as of `rpc_sync`. See `telegrad.rpc.call` for what canceling does.
        """
        return RRefProxy(self, "call", timeout)

    def remote(self, timeout: float = UNSET) -> "RRefProxy[RRef[Any]]":
        """Return a proxy whose methods return references to their results.

        The results stay on the owner. Methods return at once, also where the value is still being made. With a timeout
        they wait for the value, for no longer, and a method that it does not have raises `AttributeError` here.

        Args:
            timeout: as of `rpc_sync`.
        """
        return RRefProxy(self, "remote", timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass with the value, a scalar tensor, as its root.

        It begins on the owner, wherever this is called.

        Args:
            dist_autograd_ctx_id: of the autograd context in which the gradients are added up. On the owner -1 runs a
                pass of that worker alone, as ``tensor.backward()``, which adds to ``.grad``.
            retain_graph: see `telegrad.autograd.backward`.

        Raises:
            RuntimeError: the value is no tensor, or there is no context where one is needed; what
                `telegrad.autograd.backward` raises.
        """
        run_backward(self, dist_autograd_ctx_id, retain_graph)

    # ---- for telegrad and its drop-in

    def is_unknown(self) -> bool:
        """Tell whether requests about this reference have to introduce it to its owner."""
        return not self._worker.references.confirmed(self.id)

    def _ask(self, function: Any, timeout: float) -> CallFuture[Any]:
        """Ask the owner for the value, or for what a function makes of it."""
        calls = self._worker.calls
        future: CallFuture[Any] = calls.client.start(
            self.owner_id, function, (), _NO_KWARGS, calls.timeout(timeout), self, self.is_unknown()
        )
        return future

    def _get_type(self, timeout: float = UNSET, blocking: bool = True) -> Any:
        """The value's type; asked for once. With ``blocking=False`` a future of it."""
        if self._type is None:
            self._check()
            if self.is_owner():
                future: CallFuture[Any] = CallFuture(NO_DEVICES)
                try:
                    future.set_result(type(self._worker.references.owned(self.id).get()))
                except Exception as e:
                    future.set_exception(e.with_traceback(None))
            else:
                future = self._ask(type, timeout)
            self._type = future
            mine = weakref.ref(self)

            def forget_failure(_: Any) -> None:
                handle, done = mine(), done_future()
                if handle is not None and done is not None and handle._type is done and done.failure() is not None:
                    handle._type = None  # the next one asks again

            done_future = weakref.ref(future)
            torch.futures.Future.add_done_callback(future, forget_failure)
        else:
            future = self._type
        return future.wait() if blocking else future

    def _known_type(self) -> Any:
        """The value's type if there is a value for all that is known here, asked for if need be; else None."""
        known = self._type
        if known is None:
            if self.is_owner():
                self._exists = self._worker.references.owned(self.id).ready
            elif self._creation is not None and self._creation.done():
                self._exists = True
            if not self._exists:
                return None
        elif not known.done():
            return None
        return self._get_type()

    def _get_future(self) -> CallFuture[Any]:
        """The future of the creating call."""
        if self._creation is None:
            raise RRefError(f"{self!r} was not made by remote() on this worker, so there is no future of its creation.")
        return self._creation.future()

    def _get_profiling_future(self) -> Any:
        return self._profiling

    def _set_profiling_future(self, future: Any) -> None:
        self._profiling = future

    def _serialize(self) -> tuple[int, ...]:
        """For picklers of the program's own: what `_deserialize` needs, within the message being written."""
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

    # ---- not outside of calls

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise RRefNotPicklable

    def __copy__(self) -> NoReturn:
        raise RRefNotPicklable

    def __deepcopy__(self, _: object) -> NoReturn:
        raise RRefNotPicklable
