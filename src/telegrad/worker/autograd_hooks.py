"""Interface of distributed autograd that the worker uses.

`telegrad.autograd.service` implements it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

__all__ = ["AutogradHooks", "WorkerPlugins"]


class AutogradHooks(Protocol):
    """Autograd contexts of one worker. The worker uses only the `id` of a context."""

    # ---- outgoing messages

    def on_send(self, context: Any, peer: int, tensors: Sequence[Any], request: bool) -> int | None:
        """Record the tensors of a message that is about to leave in a context.

        Args:
            context: Context of the sender.
            peer: Receiver of the message.
            tensors: Tensors of the message that require grad.
            request: The message names the context, even without such tensors.

        Returns:
            Id under which the tensors are recorded, or 0 without tensors. None if the context has ended; then the
            message does not name the context.
        """

    def rollback(self, context: Any, message: int, peer: int) -> None:
        """Undo `carry` for a request that was not sent."""

    # ---- received messages

    @property
    def is_unguarded(self) -> bool:
        """Return whether the core may run requests in contexts without a guard."""

    def on_request_in_context(self, context_id: int, peer: int) -> Any:
        """Return the context of a received request, or None if the context has ended.

        Creates the context if this worker does not know the id yet.
        """

    def find(self, context_id: int) -> Any:
        """Return the context of a received reply, or None if the context has ended."""

    def receive(self, context: Any, peer: int, message: int, tensors: list[Any]) -> Sequence[Any]:
        """Record received tensors and return the tensors that the program gets instead."""

    def on_ended(self, peer: int, plain: Any) -> None:
        """Handle the notification of a peer that a context has ended."""

    def on_request(self, asked: Any, flags: int, body: Any, segments: Any) -> None:
        """Handle gradients from a peer: a request that gets a reply in any case."""

    def on_gradients(self, peer: int, connection: int, call: int, deadline: int, message: Any) -> None:
        """Handle gradients that the core has decoded."""

    # ---- code that runs in a context

    def handler_guard(self, context: Any) -> AbstractContextManager[None] | None:
        """Return a guard for the run of a handler in a context; None for no guard."""

    def context_guard(self, context: Any) -> AbstractContextManager[None] | None:
        """Return a guard for other code in a context, such as a coroutine's step.

        Returns None if no guard is needed.
        """

    @property
    def busy(self) -> bool:
        """Return whether a backward pass is running."""

    # ---- the group

    def peer_lost(self, peer: int, why: str) -> None:
        """Handle the loss of a worker."""

    def close(self) -> None:
        """Release all contexts of the closed worker."""

    def detach_after_fork(self) -> None:
        """Reset in a forked child, where threads are missing and locks may be held."""


class WorkerPlugins(NamedTuple):
    """Parts of each new worker that the higher layers provide."""

    rref_type: Any  # class of references, created by ``rref_type.of(worker, id, owner id, fork)``
    make_autograd: Callable[[Any, int], AutogradHooks]  # arguments: the worker, and its first id
