"""Distributed autograd of one worker: contexts, and the backward passes in them.

The worker calls it through `telegrad.worker.autograd_hooks.AutogradHooks`. The notification that a context has ended is
a one-way message. The messages of a pass are requests (`telegrad.autograd.passes.manager`).
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from telegrad.autograd.consistency.saved_tensors import PROTECTION, new_chain, protection_of
from telegrad.autograd.consistency.step_gate import BodyGuard, HandlerGuard
from telegrad.autograd.context import Context
from telegrad.autograd.contexts import Contexts
from telegrad.autograd.passes.manager import BackwardManager
from telegrad.autograd.plain.records import PLAIN, PlainContext
from telegrad.errors import TelegradError
from telegrad.wire import ANY_EPOCH
from telegrad.worker import Worker
from telegrad.worker.diagnostics.size_warning import SizeWarning

__all__ = ["Autograd"]

_COLLECT_DELAY = 5_000_000  # ns that notifications of freed tensors wait to be batched
_MOST_RELEASED = 4096  # ids in one message


class Autograd:
    """Contexts and passes of one worker.

    Args:
        worker: The worker.
        first_id: See `Contexts`; also the start of the numbers of passes.
    """

    def __init__(self, worker: Worker, first_id: int) -> None:
        self.worker = worker
        self.contexts: Contexts = Contexts(
            worker.info.id,
            first_id,
            self._notify_end,
            self._on_context_end,
            worker.is_open,
            SizeWarning(worker.info.name, "autograd contexts", "warn_contexts", worker.options.warn_contexts),
            worker.members.name_of,
            worker.members.last_lost,
        )
        self.passes: BackwardManager = BackwardManager(worker, self.contexts, first_id)
        self.plain: PlainContext = self.contexts.plain
        self.plain.request_callback = self._request_callback
        self.plain.is_lost = worker.members.lost.__contains__
        self.plain.is_removed = worker.members.removed.__contains__
        self.plain.name_of = worker.members.name_of
        self.plain.backward = self.passes.backward
        self.outside: PlainContext | None = self.plain if worker.options.plain_backward else None
        self.backward: Callable[[Context, list[Tensor], bool], None] = self.passes.backward
        self.on_request: Callable[..., None] = self.passes.on_request
        self.on_gradients: Callable[..., None] = self.passes.on_gradients
        self.on_send: Callable[[Context, int, Sequence[Tensor], bool, int], int | None] = self.contexts.on_send
        self.rollback: Callable[[Context, int, int, int | None], None] = self.contexts.rollback
        self.on_request_in_context: Callable[[int, int, int], Context | None] = self.contexts.on_request
        self.find: Callable[[int], Context | None] = self.contexts.find
        self.find_for_reply: Callable[[int], Context | None] = self.contexts.find_for_reply
        self.wrap: Callable[[Context, int, int], Callable[[list[Tensor]], Sequence[Tensor]]] = self.contexts.wrap

    # ---- contexts

    def _notify_end(self, peer: int, ended: tuple[int, object], epoch: int = ANY_EPOCH) -> None:
        calls = self.worker.calls
        calls.send_message("Cleanup", peer, partial(calls.client.notify_context_ended, peer, ended, epoch))

    def on_ended(self, peer: int, connection: int, notification: tuple[int, int | tuple[int, ...]]) -> None:
        """Process a peer's notification of an end.

        Args:
            peer: The peer.
            connection: The connection of the notification.
            notification: (context id, number of requests), after a loss (context id, (number of requests, id of the
                lost worker)), or for the plain context (its id, (the lowest number of the peer's passes that is not
                over, ids of messages that the peer does not need any more)).
        """
        context_id, what = notification
        first, *rest = what if isinstance(what, tuple) else (what,)
        if context_id != PLAIN:
            self.contexts.on_ended(peer, context_id, first, connection, *rest)
            return
        min_live, messages = first, rest
        self.plain.release(messages)
        self.passes.on_finished(self.plain, peer, min_live)

    # ---- the plain context

    def _request_callback(self) -> None:
        self.worker.engine.request_callback(_COLLECT_DELAY)

    def collect(self) -> None:
        """Notify the senders of received tensors that have been freed."""
        for peer, messages in self.plain.collect().items():
            for start in range(0, max(len(messages), 1), _MOST_RELEASED):
                released = messages[start : start + _MOST_RELEASED]
                self._notify_end(peer, (PLAIN, (self.passes.min_live(self.plain), *released)))

    def _on_context_end(self, context: Context, why: str) -> None:
        if context.passes:
            what = f"autograd context {context.id} has ended while a backward pass ran in it: {why}."
            lost = context.lost_worker is not None
            self.passes.on_context_end(context, lambda: self.contexts.loss_of(context) if lost else TelegradError(what))

    # ---- code that runs in a context

    def chain_of_request(self, context: Context, chain: int) -> int:
        """Return the call chain of a request; see `consistency.step_gate`.

        A request outside of contexts begins a chain at the first worker with an optimizer.
        """
        if context.id != PLAIN or chain or self.is_unguarded:
            return chain
        return new_chain(self.worker.info.id)

    def handler_guard(self, context: Context, chain: int) -> HandlerGuard | None:
        """Return a guard around the run of a handler; see `consistency.saved_tensors`."""
        protection = protection_of(self.worker)
        return None if protection is None else protection.handler_guard(chain or context.id)

    @property
    def is_unguarded(self) -> bool:
        """Whether handlers run without a guard."""
        return PROTECTION not in self.worker.attachments

    def context_guard(self, context: Context) -> BodyGuard | None:
        """Return a guard around other code that runs in a context."""
        protection = protection_of(self.worker)
        return None if protection is None else protection.context_guard(context.id)

    @property
    def busy(self) -> bool:
        """Whether a backward pass is in progress."""
        return self.passes.count > 0

    # ---- the group

    def peer_lost(self, peer: int, why: str) -> None:
        """Process the loss of a worker."""
        for context in self.contexts.peer_lost(peer, self.worker.references.epoch_of(peer)):
            if context.passes:
                self.passes.peer_lost(context, peer, why)

    def peer_joined(self, peer: int) -> None:
        """Process the return of a lost worker."""
        self.contexts.peer_joined(peer, self.worker.references.epoch_of(peer))

    def close(self) -> None:
        """End all contexts and passes: the worker is closed."""
        self.passes.close()
        self.contexts.close()

    def detach_after_fork(self) -> None:
        """Discard the state in a forked child."""
        self.contexts.detach_after_fork()

    def left(self) -> dict[str, int]:
        """Return the counts that are zero on a quiescent worker."""
        contexts = self.contexts
        return {
            "autograd contexts": len(contexts.table),
            "autograd contexts that have ended, but not for all": len(contexts.tombstones),
            "autograd contexts that were not left before the end": contexts.leaked,
            "backward passes": self.passes.count,
            "messages sent outside of contexts whose graph is kept": self.kept_graphs,
            "messages received outside of contexts with live tensors": len(self.plain.receipts),
        }

    @property
    def kept_graphs(self) -> int:
        """Return the number of messages whose graph is kept for plain passes."""
        return len(self.plain.sends) + len(self.plain.consumed)

    def stats(self) -> dict[str, int]:
        """Return the numbers of passes and contexts under torch's names."""
        return {"num_current_backward_passes": self.passes.count, "num_autograd_contexts": len(self.contexts.table)}
