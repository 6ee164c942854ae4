"""Creations of references, at their creator and at their owner."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from telegrad.errors import MessageTooLarge, Overloaded, TelegradError
from telegrad.protocols.rref import Effect, RRefId, RRefTable
from telegrad.serialize.tracebacks import text_of
from telegrad.worker.diagnostics.size_warning import SizeWarning
from telegrad.worker.losses import LossReason
from telegrad.worker.refs.owned_value import OwnedValue

__all__ = ["CreationTarget", "Creations", "Refusal"]

_NOTHING: Sequence[Callable[[], None]] = ()
_NO_EFFECTS: Sequence[Effect] = ()
_MAX_REASON = 8 << 10  # characters of an error in a protocol message, which must stay small


class Refusal(str):
    """Reason that a creation failed that was not made because of a limit.

    Args:
        why: The reason.
        error: The error of its users.
    """

    __slots__ = ("error",)
    error: TelegradError

    def __new__(cls, why: str, error: TelegradError) -> Self:
        refusal = super().__new__(cls, why)
        refusal.error = error
        return refusal


class CreationTarget(Protocol):
    """Call that creates a value on another worker (telegrad.rref.creation)."""

    rref: RRefId | None  # set by `References.begin_create`
    ended: bool


class Creations:
    """Part of `References` that creates them, at their creator and at their owner."""

    worker_id: int
    table: RRefTable
    values: dict[RRefId, OwnedValue]
    _pending: set[CreationTarget]
    warning: SizeWarning
    lock: threading.RLock
    dropped: Sequence[tuple[RRefId, int]]
    new_id: Callable[[], int]
    _failed_here: dict[RRefId, str]
    _apply: Callable[[Sequence[Effect]], Sequence[Callable[[], None]]]
    _run_deferred: Callable[[Sequence[Callable[[], None]]], None]
    _drop_handles: Callable[[], list[Effect]]
    _is_late: Callable[[int, int], bool]

    def own(self, value: object) -> RRefId:
        """Create a reference to a local value."""
        rref = RRefId(self.worker_id, self.new_id())
        with self.lock:
            owned = self.values[rref] = OwnedValue(self.lock)
            owned.set_result(value, None)
            deferred = self._apply(self.table.own(rref))
        self._run_deferred(deferred)
        self.warning.check(self.table.size())
        return rref

    @property
    def pending_creations(self) -> int:
        """Number of creating calls of this worker that have not ended."""
        return len(self._pending)

    def begin_create(self, owner: int, local_id: int, creation: CreationTarget) -> RRefId:
        """Register a reference to the result of a creating call, which may have been sent.

        If a signal handler has raised in the middle, the next call for this creation completes it.
        """
        rref = RRefId(self.worker_id, local_id)
        with self.lock:
            again = creation.rref is not None
            creation.rref = rref
            if owner == self.worker_id:
                self.values[rref] = OwnedValue(self.lock)
            if not creation.ended:
                self._pending.add(creation)
            is_known = again and self.table.state_of(rref) is not None
            effects = _NO_EFFECTS if is_known else self.table.begin_create(rref, owner)
            if self.dropped:  # saves a wake-up of the pool for programs that create and release many
                effects = [*effects, *self._drop_handles()]
            deferred = self._apply(effects)
        self._run_deferred(deferred)
        self.warning.check(self.table.size())
        return rref

    def created(self, rref: RRefId) -> None:
        """Handle the owner's confirmation that it has stored the value or its failure."""
        with self.lock:
            deferred = self._apply(self.table.created(rref))
        self._run_deferred(deferred)

    def finish_creation(self, creation: CreationTarget, created: bool) -> bool:
        """Handle the end of a creating call; `created` if the owner has confirmed it.

        Returns False, without effect, if `begin_create` has not run yet.
        """
        with self.lock:
            rref = creation.rref
            if rref is None:
                return False
            deferred = self._apply(self.table.created(rref) if created else ())
            self._pending.discard(creation)
            creation.ended = True
        self._run_deferred(deferred)
        return True

    def create_lost(self, rref: RRefId, why: LossReason) -> None:
        """Handle the end of the session that carried a creating call."""
        with self.lock:
            deferred = self._apply(self.table.create_lost(rref, why))
        self._run_deferred(deferred)

    def create_failed(self, rref: RRefId, error: BaseException, may_exist: bool) -> None:
        """Handle the failure of a creating call: its local users get no value."""
        why = f"{type(error).__name__}: {text_of(error)}"[:_MAX_REASON]
        if not may_exist and isinstance(error, Overloaded | MessageTooLarge):
            why = Refusal(why, error)
        with self.lock:
            owned = self.values.get(rref)
            if owned is not None:  # this worker is the owner
                deferred: Sequence[Callable[[], None]] = ()
                self._failed_here[rref] = why
                if not may_exist and not owned.ready:
                    deferred = (*owned.set_result(None, error), *self._apply(self.table.value_failed(rref)))
            else:
                deferred = self._apply(self.table.create_failed(rref, why, may_exist))
        self._run_deferred(deferred)

    def accept_create(self, rref: RRefId, creator: int, connection: int) -> OwnedValue:
        """Accept a creation as the owner."""
        with self.lock:
            late = self._is_late(creator, connection)
            owned = self.values.get(rref)
            if owned is None or owned.ready:  # ready: failed when its creator was lost, which has reconnected
                owned = self.values[rref] = OwnedValue(self.lock)
            deferred = (
                self._apply(self.table.accept_create(rref, creator, late)) if creator != self.worker_id else _NOTHING
            )
        if deferred:
            self._run_deferred(deferred)
        self.warning.check(self.table.size())
        return owned

    def set_result(self, rref: RRefId, value: object, error: BaseException | None) -> None:
        """Set the value of a creation as the owner, when the function returns or raises."""
        with self.lock:
            owned = self.values.get(rref)
            if owned is None or owned.ready:
                return
            parked = owned.set_result(value, error)
            deferred = self._apply(self.table.value_ready(rref) if error is None else self.table.value_failed(rref))
            if parked:
                deferred = (*parked, *deferred)
        if deferred:
            self._run_deferred(deferred)
