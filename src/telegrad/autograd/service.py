"""Distributed autograd of one worker: its contexts, and the backward passes that run in them.

The worker calls it through `telegrad.worker.autograd_hooks.AutogradHooks`. The notice that a context has ended is a
one-way message. The messages of a pass are requests (`telegrad.autograd.passes.manager`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from telegrad.autograd.consistency.saved_tensors import PROTECTION, protection_of
from telegrad.autograd.consistency.step_gate import BodyGuard, HandlerGuard
from telegrad.autograd.context import Context
from telegrad.autograd.contexts import Contexts
from telegrad.autograd.passes.manager import BackwardManager

__all__ = ["Autograd"]


class Autograd:
    """Everything of one worker.

    Args:
        worker: the worker.
        first_id: see `Contexts`.
    """

    def __init__(self, worker: Any, first_id: int) -> None:
        self.worker = worker
        self.contexts: Contexts = Contexts(worker.info.id, first_id, self._tell, self._ended)
        self.passes: BackwardManager = BackwardManager(worker, self.contexts)
        self.backward: Callable[[Context, list[Tensor], bool], None] = self.passes.backward
        self.on_request: Callable[..., None] = self.passes.on_request
        self.on_gradients: Callable[[int, int, int, int, Any], None] = self.passes.on_gradients
        self.carry: Callable[[Context, int, Sequence[Tensor], bool], int | None] = self.contexts.carry
        self.rollback: Callable[[Context, int, int], None] = self.contexts.rollback
        self.arrived: Callable[[int, int], Context | None] = self.contexts.arrived
        self.find: Callable[[int], Context | None] = self.contexts.find
        self.receive: Callable[[Context, int, int, list[Tensor]], Sequence[Any]] = self.contexts.receive

    # ---- contexts

    def _tell(self, peer: int, ended: tuple[int, int]) -> None:
        calls = self.worker.calls
        if calls.send_filter is None:
            calls.client.tell(peer, ended)
        else:
            calls.send_filtered("Cleanup", False, peer, partial(calls.client.tell, peer, ended))

    def on_ended(self, peer: int, plain: Any) -> None:
        """A peer says that a context has ended."""
        context_id, requests = plain
        self.contexts.on_ended(peer, context_id, requests)

    def _ended(self, context: Context, why: str) -> None:
        if context.passes:
            self.passes.context_ended(context, why)

    # ---- code that runs in a context

    def handler_guard(self, context: Context) -> HandlerGuard | None:
        """Around the run of a handler; see `telegrad.autograd.consistency.saved_tensors`."""
        protection = protection_of(self.worker)
        return None if protection is None else protection.handler_guard(context.id)

    @property
    def plain(self) -> bool:
        """Is there nothing around the run of a handler?"""
        return PROTECTION not in self.worker.attachments

    def context_guard(self, context: Context) -> BodyGuard | None:
        """Around other code."""
        protection = protection_of(self.worker)
        return None if protection is None else protection.context_guard(context.id)

    @property
    def busy(self) -> bool:
        """Is a backward pass under way?"""
        return self.passes.count > 0

    # ---- the group

    def peer_lost(self, peer: int, why: str) -> None:
        """A worker is gone."""
        for context in self.contexts.peer_lost(peer):
            if context.passes:
                self.passes.peer_lost(context, peer, why)

    def close(self) -> None:
        """The worker is closed."""
        self.passes.close()
        self.contexts.close()

    def detach_after_fork(self) -> None:
        """In a forked child."""
        self.contexts.detach_after_fork()

    def left(self) -> dict[str, int]:
        """What there must be none of when nothing is under way."""
        contexts = self.contexts
        return {
            "autograd contexts": len(contexts.table),
            "autograd contexts that have ended, but not for all": len(contexts.late),
            "autograd contexts that were not left before the end": contexts.left_open,
            "backward passes": self.passes.count,
        }

    def stats(self) -> dict[str, int]:
        """How many there are now, under torch's names."""
        return {"num_current_backward_passes": self.passes.count, "num_autograd_contexts": len(self.contexts.table)}
