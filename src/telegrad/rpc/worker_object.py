"""`Worker`: a member of a group as an object."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

from telegrad.group.joining import join_at
from telegrad.options import RpcBackendOptions, as_options
from telegrad.rpc import api
from telegrad.rpc.calls import Args, Kwargs
from telegrad.rpc.multicast import multicast
from telegrad.rpc.start import check_identity, handle_signals, join
from telegrad.rpc.streams import Items, stream
from telegrad.rref import RRef
from telegrad.streams.stream import PREFETCH, Stream
from telegrad.types import To, WorkerInfo
from telegrad.worker.calls.future import CallFuture, Deferred
from telegrad.worker.calls.retry_policy import Retry
from telegrad.worker.diagnostics.debug_info import DebugInfo
from telegrad.worker.diagnostics.snapshot import snapshot

__all__ = ["Worker"]

T = TypeVar("T")


class Worker:
    """Worker as an object, for several workers or groups in one process.

    Creating it joins the group, as `init_rpc` does for the process's default worker. Within ``with worker:`` the
    functions of `telegrad.rpc` use this worker. Its methods always do, from any thread.

    Args:
        name, rank, world_size, store: as for `init_rpc`.
        options: `telegrad.rpc.Options`.

    Attributes:
        info: its name and id.

    Raises:
        RuntimeError, ValueError, TypeError: as `init_rpc`.

    Example::

        worker = rpc.Worker("trainer0", rank=0, world_size=2)
        with worker:
            rpc.rpc_sync("trainer1", print, args=("hello",))
        worker.shutdown()
    """

    def __init__(
        self,
        name: str,
        rank: int = -1,
        world_size: int | None = None,
        options: RpcBackendOptions | None = None,
        *,
        store: Any = None,
    ) -> None:
        check_identity(name, rank, world_size)
        handle_signals(options)
        if store is not None:
            self._worker = join(store, name, rank, world_size, options)
        else:
            self._worker = join_at(
                name,
                as_options(options),
                rank,
                world_size,
                lambda part, rank, world_size: join(part, name, rank, world_size, options),
            )
        self.info: WorkerInfo = self._worker.info

    def __enter__(self) -> "Worker":
        self._worker.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.__exit__(*error)

    def __repr__(self) -> str:
        return repr(self._worker)

    @overload
    def rpc_sync(
        self,
        to: To,
        func: Callable[..., Deferred[T]],
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = ...,
        retry: Retry | None = ...,
    ) -> T: ...
    @overload
    def rpc_sync(
        self,
        to: To,
        func: Callable[..., T],
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = ...,
        retry: Retry | None = ...,
    ) -> T: ...

    def rpc_sync(
        self,
        to: To,
        func: Callable[..., object],
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = -1.0,
        retry: Retry | None = None,
    ) -> Any:
        """Call a worker and wait, as `telegrad.rpc.rpc_sync` through this worker."""
        with self._worker:
            return api.rpc_sync(to, func, args, kwargs, timeout, retry)

    @overload
    def rpc_async(
        self,
        to: To,
        func: Callable[..., Deferred[T]],
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = ...,
        retry: Retry | None = ...,
    ) -> CallFuture[T]: ...
    @overload
    def rpc_async(
        self,
        to: To,
        func: Callable[..., T],
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = ...,
        retry: Retry | None = ...,
    ) -> CallFuture[T]: ...

    def rpc_async(
        self,
        to: To,
        func: Callable[..., object],
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = -1.0,
        retry: Retry | None = None,
    ) -> CallFuture[Any]:
        """Call a worker, as `telegrad.rpc.rpc_async` through this worker."""
        with self._worker:
            return api.rpc_async(to, func, args, kwargs, timeout, retry)

    @overload
    async def call(
        self,
        to: To,
        func: Callable[..., Deferred[T]],
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = ...,
        retry: Retry | None = ...,
    ) -> T: ...
    @overload
    async def call(
        self,
        to: To,
        func: Callable[..., T],
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = ...,
        retry: Retry | None = ...,
    ) -> T: ...

    async def call(
        self,
        to: To,
        func: Callable[..., object],
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = -1.0,
        retry: Retry | None = None,
    ) -> Any:
        """Call a worker and await it, as `telegrad.rpc.call` through this worker."""
        return await self.rpc_async(to, func, args, kwargs, timeout, retry)

    @overload
    def multicast(
        self,
        to: Iterable[To],
        func: Callable[..., Deferred[T]],
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = ...,
    ) -> list[CallFuture[T]]: ...
    @overload
    def multicast(
        self, to: Iterable[To], func: Callable[..., T], args: Args = None, kwargs: Kwargs = None, timeout: float = ...
    ) -> list[CallFuture[T]]: ...

    def multicast(
        self,
        to: Iterable[To],
        func: Callable[..., object],
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = -1.0,
    ) -> list[CallFuture[Any]]:
        """Call several workers, as `telegrad.rpc.multicast` through this worker."""
        with self._worker:
            return multicast(to, func, args, kwargs, timeout)

    def stream(
        self,
        to: To,
        func: Callable[..., Items[T]],
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = -1.0,
        *,
        prefetch: int = PREFETCH,
    ) -> Stream[T]:
        """Open a stream, as `telegrad.rpc.stream` through this worker."""
        with self._worker:
            return stream(to, func, args, kwargs, timeout, prefetch=prefetch)

    @overload
    def remote(
        self, to: To, func: Callable[..., Deferred[T]], args: Args = None, kwargs: Kwargs = None, timeout: float = ...
    ) -> RRef[T]: ...
    @overload
    def remote(
        self, to: To, func: Callable[..., T], args: Args = None, kwargs: Kwargs = None, timeout: float = ...
    ) -> RRef[T]: ...

    def remote(
        self, to: To, func: Callable[..., Any], args: Args = None, kwargs: Kwargs = None, timeout: float = -1.0
    ) -> RRef[Any]:
        """Create a value on a worker, as `telegrad.rpc.remote` through this worker."""
        with self._worker:
            return api.remote(to, func, args, kwargs, timeout)

    def rref(self, value: T) -> RRef[T]:
        """Create a reference to a value of this worker, which owns it.

        Args:
            value: anything; it is not copied.
        """
        with self._worker:
            return RRef(value)

    def get_worker_info(self, worker_name: str | int | None = None) -> WorkerInfo:
        """Look up a worker, by default this one, like `telegrad.rpc.get_worker_info`."""
        return self._worker.members.look_up(worker_name)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """List all workers of the group, in the order of their ids."""
        return self._worker.members.infos()

    def debug_info(self) -> DebugInfo:
        """Return a snapshot of this worker, like `telegrad.rpc.debug_info`.

        It may be closed.
        """
        return snapshot(self._worker)

    def shutdown(self, graceful: bool = True, timeout: float = 0) -> None:
        """Leave the group, as `telegrad.rpc.shutdown` of this worker.

        A further call does nothing, except that it waits for one in progress on another thread.
        """
        if self._worker.closed:
            self._worker.close()
            return
        with self._worker:
            api.shutdown_worker(self._worker, graceful, timeout)
