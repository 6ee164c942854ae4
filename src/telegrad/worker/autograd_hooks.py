"""Interface of distributed autograd that the worker uses.

`telegrad.autograd.service` implements it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from telegrad.serialize.tensor_layout import Body, Buffer

__all__ = ["AutogradContext", "AutogradHooks", "WorkerPlugins"]


class AutogradContext(Protocol):
    """Autograd context, as far as the worker uses it."""

    id: int


C = TypeVar("C", bound=AutogradContext)


class AutogradHooks(Protocol[C]):
    """Autograd contexts of one worker."""

    # ---- outgoing messages

    def on_send(self, context: C, peer: int, tensors: Sequence[Tensor], request: bool, epoch: int) -> int | None:
        """Record the tensors of a message that is about to leave in a context.

        Args:
            context: Context of the sender.
            peer: Receiver of the message.
            tensors: Tensors of the message that require grad.
            request: The message names the context, even without such tensors.
            epoch: Epoch of a request; it was read before.

        Returns:
            Id under which the tensors are recorded, or 0 without tensors. None if the context has ended; then the
            message does not name the context.

        Raises:
            WorkerLost: A loss has ended the context on this worker.
        """

    def rollback(self, context: C, message: int, peer: int, epoch: int | None) -> None:
        """Undo `on_send` for a message that was not sent.

        `epoch` is that of a request, None for a reply.
        """

    # ---- received messages

    @property
    def is_unguarded(self) -> bool:
        """Return whether the core may run requests in contexts without a guard."""

    def on_request_in_context(self, context_id: int, peer: int, connection: int) -> C | None:
        """Return the context of a received request, or None if the context has ended.

        Creates the context if this worker does not know the id yet.
        """

    def find(self, context_id: int) -> C | None:
        """Return a context, or None if it has ended."""

    def find_for_reply(self, context_id: int) -> C | None:
        """Return the context of a received reply, or None if the context was left.

        A context that a loss has ended is returned: `on_send` raises in it.
        """

    def wrap(self, context: C, peer: int, message: int) -> Callable[[list[Tensor]], Sequence[Tensor]]:
        """Return the function that gets the tensors of a received message.

        It records them, and returns those that the program gets instead.
        """

    def on_ended(self, peer: int, connection: int, plain: tuple[int, Any]) -> None:
        """Handle the notification of a peer that a context or its records have ended."""

    @property
    def plain(self) -> C:
        """Return the context of calls that are recorded outside of contexts."""

    @property
    def outside(self) -> C | None:
        """Return the context of code that is in none, if any."""

    def collect(self) -> None:
        """Notify peers of received tensors that have been freed. A pool thread calls it."""

    def on_request(self, asked: object, flags: int, body: Body, segments: list[Buffer]) -> None:
        """Handle a request with gradients from a peer; always reply."""

    def on_gradients(self, peer: int, connection: int, call: int, deadline: int, message: object) -> None:
        """Handle gradients that the core has decoded."""

    # ---- code that runs in a context

    def chain_of_request(self, context: C, chain: int) -> int:
        """Return the call chain of a request; 0 if it belongs to none.

        Args:
            context: Context of the request.
            chain: Chain of the caller; 0 for none.
        """

    def handler_guard(self, context: C, chain: int) -> AbstractContextManager[None] | None:
        """Return a guard for the run of a handler in a context; None for no guard.

        Args:
            context: Context of the request.
            chain: Its call chain, if the context is the plain one.
        """

    def context_guard(self, context: C) -> AbstractContextManager[None] | None:
        """Return a guard for other code in a context, such as a coroutine's step.

        Returns None if no guard is needed.
        """

    @property
    def busy(self) -> bool:
        """Return whether a backward pass is running."""

    def stats(self) -> dict[str, int]:
        """Return the numbers of passes and contexts under torch's names."""

    @property
    def kept_graphs(self) -> int:
        """Return the number of messages whose graph is kept for plain passes."""

    # ---- the group

    def peer_lost(self, peer: int, why: str) -> None:
        """Handle the loss of a worker."""

    def peer_joined(self, peer: int) -> None:
        """Handle the return of a lost worker, or of a new process with its id."""

    def close(self) -> None:
        """Release all contexts of the closed worker."""

    def detach_after_fork(self) -> None:
        """Reset in a forked child, where threads are missing and locks may be held."""


class WorkerPlugins(NamedTuple):
    """Parts of each new worker that the higher layers provide."""

    rref_type: Any  # class of references, created by ``rref_type.of(worker, id, owner id, fork)``
    make_autograd: Callable[[Any, int], AutogradHooks[Any]]  # arguments: the worker, and its first id
