"""What the worker needs of distributed autograd, which stands on it (`telegrad.autograd.service`)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

__all__ = ["AutogradHooks", "WorkerPlugins"]


class AutogradHooks(Protocol):
    """The autograd contexts of one worker. A context is opaque here, but for its `id`."""

    # ---- messages on their way out

    def carry(self, context: Any, peer: int, tensors: Sequence[Any], request: bool) -> int | None:
        """A message made in a context is about to leave.

        Args:
            tensors: those in it that require grad.
            request: it names the context, whether it has such tensors or not.

        Returns:
            The id under which the tensors are recorded, 0 if there are none; None: the context has ended, and the
            message does not name it.
        """

    def rollback(self, context: Any, message: int, peer: int) -> None:
        """A request made in a context did not leave."""

    # ---- messages that have come

    @property
    def plain(self) -> bool:
        """May the core run requests made in contexts by itself? Not where something has to be around their run."""

    def arrived(self, context_id: int, peer: int) -> Any:
        """A request made in a context has come: the context, which begins here if it is new; None: it has ended."""

    def find(self, context_id: int) -> Any:
        """A reply made in a context has come: the context; None: it has ended."""

    def receive(self, context: Any, peer: int, message: int, tensors: list[Any]) -> Sequence[Any]:
        """Records tensors that have come. Returns what the program gets in their place."""

    def on_ended(self, peer: int, plain: Any) -> None:
        """A peer says that a context has ended."""

    def on_request(self, asked: Any, flags: int, body: Any, segments: Any) -> None:
        """Handle gradients from a peer: a request that must be answered, also after an error."""

    def on_gradients(self, peer: int, connection: int, call: int, deadline: int, message: Any) -> None:
        """Handle gradients that the core has decoded."""

    # ---- code that runs in a context

    def running(self, context: Any) -> AbstractContextManager[None] | None:
        """To be entered around the run of a handler; None: there is nothing to do."""

    def within(self, context: Any) -> AbstractContextManager[None] | None:
        """To be entered around other code, such as a step of a coroutine; None: there is nothing to do."""

    @property
    def busy(self) -> bool:
        """Is a backward pass under way?"""

    # ---- the group

    def peer_lost(self, peer: int, why: str) -> None:
        """A worker is gone."""

    def close(self) -> None:
        """This worker is closed."""

    def abandon(self) -> None:
        """In a forked child: all is dead, locks may be held by threads that are not there."""


class WorkerPlugins(NamedTuple):
    """What the layers above bring for each worker that is made."""

    handle: Any  # the class of references; made by ``handle.of(worker, id, owner id, fork)``
    recorder: Callable[[Any, int], AutogradHooks]  # of the worker, and where its ids start
