"""Worker under the interface of torch's agent object."""

from typing import Any

from telegrad.types import WorkerInfo
from telegrad.worker import Worker

__all__ = ["Agent", "gil_profiling"]

gil_profiling: list[bool] = [False]  # kept for programs that set it; waits are not measured


class Agent:
    """Worker under the interface of torch's ``TensorPipeAgent``.

    `telegrad.compat.rpc` exports this class under torch's name.

    Attributes:
        worker: the wrapped worker.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    @property
    def is_static_group(self) -> bool:
        """Return whether all members join at the start."""
        return self.worker.static

    @property
    def store(self) -> Any:
        """Return the c10d store that the group used for its rendezvous."""
        return self.worker.store

    def get_worker_info(self, worker: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """Return the info of a worker, by default of this one.

        Args:
            worker: a worker's name, id or info.

        Raises:
            RuntimeError: the group has no such worker.
            TypeError: ``worker`` is none of these.
        """
        return self.worker.members.look_up(worker)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return the infos of all workers of the group."""
        return self.worker.members.infos()

    def get_metrics(self) -> dict[str, str]:
        """Return the current counts as strings, under torch's names.

        Active calls of the server are the running handlers and, as in torch, the calls with a deferred result (async).
        """
        stats = self.worker.engine.stats()
        asynchronous = self.worker.handlers.async_calls
        metrics = {
            "agent.thread_pool_size": self.worker.options.num_worker_threads,
            "agent.num_idle_threads": max(stats["pool_threads"] - stats["running_handlers"], 0),
            "agent.client_active_calls": stats["pending_calls"],
            "agent.server_active_calls": stats["running_handlers"] + asynchronous,
            "agent.server_active_async_calls": asynchronous,
        }
        if gil_profiling[0]:
            metrics["agent.gil_average_wait_time_us"] = 0
        return {key: str(value) for key, value in metrics.items()}

    def get_debug_info(self) -> dict[str, str]:
        """Return the metrics and the number of requests that wait for a thread."""
        return {**self.get_metrics(), "agent.num_pending_requests": str(self.worker.engine.stats()["queued_requests"])}

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until this worker has no work left."""
        self.worker.shutdown.drain(timeout)

    def sync(self) -> None:
        """Wait as `join` does; kept for programs that call it."""
        self.worker.shutdown.drain(0)

    def shutdown(self) -> None:
        """Leave the group at once."""
        self.worker.close()

    def _get_device_map(self, _: WorkerInfo) -> dict[object, object]:
        return {}

    def _get_backend_options(self) -> object:
        return self.worker.options
