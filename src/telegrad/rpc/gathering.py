"""State of one worker in operations that several run together, such as a barrier.

Each operation belongs to a key, which is a purpose and a set of workers. One of the workers is the leader, the others
are its followers. A worker runs its operations with one key one after the other and numbers them. This number and that
of the process (`telegrad.protocols.membership.ordinal_of`) identify an operation of one worker. They are never compared
with those of another worker, so workers that have failed a different number of times meet in their next operation.

1. A follower offers its value to the leader. The offer is open until the follower withdraws it or offers again, or
   until the leader uses it.
2. If each follower has an open offer, the leader asks each whether the operation of this offer still waits. If one does
   not, the leader drops its offer and waits for the next one.
3. If all wait, the leader closes the offers and sends the values to all. The operations of the workers end with them.

Invariant: the values with which an operation ends are those of operations of all workers that waited at one moment.
This is the moment before the leader asks: each follower has offered before it, and confirms after it that the same
operation still waits. So messages may be late, lost or in another order. Those for an operation that is over have no
effect, and the reply says so.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from telegrad.errors import TelegradError

__all__ = ["AllGatherStates", "Gathering", "Offer", "Operation", "OperationId"]


class AllGatherStates:
    """State of one gathering in progress, on one worker.

    Example::

        state = rpc.AllGatherStates()
        assert not state.proceed_signal.is_set()
    """

    def __init__(self) -> None:
        self.gathered_objects: dict[str, object] = {}
        self.proceed_signal: threading.Event = threading.Event()


class OperationId(NamedTuple):
    """Id of an operation of one worker; of two with one key, the later one is greater."""

    purpose: str
    names: tuple[str, ...]  # sorted
    ordinal: int  # number of the worker's process
    number: int

    def __str__(self) -> str:
        return "|".join((self.purpose, ",".join(self.names), str(self.ordinal), str(self.number)))

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        """Purpose and names."""
        return self.purpose, self.names

    @classmethod
    def parse(cls, text: str) -> "OperationId | None":
        """Return the id with a text; None for a text that is none."""
        try:
            purpose, names, ordinal, number = text.rsplit("|", 3)
            return cls(purpose, tuple(names.split(",")), int(ordinal), int(number))
        except ValueError:
            return None


class Operation(AllGatherStates):
    """Operation of this worker.

    It is over when it has values or a failure, or its thread has finished it.
    """

    def __init__(self, op_id: OperationId) -> None:
        super().__init__()
        self.id = op_id
        self.failure: TelegradError | None = None  # the error with which the leader ended it
        self.is_confirmed = False  # the leader may have completed it


class Offer(NamedTuple):
    """Newest operation of a follower that the leader knows."""

    id: OperationId
    is_open: bool
    value: object = None


class _Sequence:
    """Operations with one key."""

    def __init__(self) -> None:
        self.number = 0  # of the next operation of this worker
        self.operations: deque[Operation] = deque()  # of this worker; the first one runs, the others wait for it
        self.offers: dict[str, Offer] = {}  # on the leader, by follower


class Gathering:
    """Operations of one worker.

    Args:
        name: Name of the worker.
        known: Returns the numbers of the newest known processes of some workers.
    """

    def __init__(self, name: str, known: Callable[[tuple[str, ...]], tuple[int, ...]]) -> None:
        self.lock: threading.RLock = threading.RLock()
        self.name: str = name
        self._known = known
        self._sequences: dict[tuple[str, tuple[str, ...]], _Sequence] = {}

    @property
    def operations(self) -> list[Operation]:
        """Operations of this worker that are not finished."""
        with self.lock:
            return [op for sequence in self._sequences.values() for op in sequence.operations]

    @property
    def open_offers(self) -> dict[tuple[str, OperationId], object]:
        """Values that followers have offered to this worker, by follower and id."""
        with self.lock:
            offers = [item for sequence in self._sequences.values() for item in sequence.offers.items()]
            return {(name, offer.id): offer.value for name, offer in offers if offer.is_open}

    # ---- called by threads that take part

    def begin(self, names: Iterable[str], purpose: str) -> Operation:
        """Add the next operation of this worker; it may have to wait for its turn."""
        key = purpose, tuple(sorted(names))
        ordinal = self._known((self.name,))[0]
        with self.lock:
            sequence = self._sequence(key)
            op = Operation(OperationId(*key, ordinal, sequence.number))
            sequence.number += 1
            sequence.operations.append(op)
            return op

    def has_turn(self, op: Operation) -> bool:
        """Return whether the earlier operations with this key are finished."""
        with self.lock:
            return self._sequence(op.id.key).operations[0] is op

    def finish(self, op: Operation) -> bool:
        """Remove an operation: whatever arrives for it from now on has no effect.

        Returns:
            Whether it has the values of all workers.
        """
        with self.lock:
            operations = self._sequence(op.id.key).operations
            operations.remove(op)
            if operations:
                operations[0].proceed_signal.set()
            return bool(op.gathered_objects)

    def newest(self, key: tuple[str, tuple[str, ...]]) -> dict[str, int]:
        """Return the numbers of the newest processes, known or read in offers, by name."""
        known = dict(zip(key[1], self._known(key[1]), strict=True))
        with self.lock:
            offers = self._sequence(key).offers
            return {name: max(n, offers[name].id.ordinal if name in offers else 0) for name, n in known.items()}

    # ---- on the leader

    def collect(self, sequence_id: str, name: str, value: object, names: set[str]) -> bool:
        """Add the offer of a follower.

        Returns:
            Whether an operation of this worker waits for it.

        Raises:
            TelegradError: The worker does not take part.
        """
        op_id = OperationId.parse(sequence_id)
        if op_id is None or name not in names or name not in op_id.names:
            taking_part = ", ".join(sorted(names if op_id is None else op_id.names))
            raise TelegradError(f"{name} is not expected by leader {self.name}: the operation is of {taking_part}.")
        with self.lock:
            sequence = self._sequence(op_id.key)
            known = sequence.offers.get(name)
            if known is None or known.id < op_id:  # otherwise it was overtaken by its withdrawal, or by the next one
                sequence.offers[name] = Offer(op_id, True, value)
            if sequence.operations:
                sequence.operations[0].proceed_signal.set()
            return bool(sequence.operations)

    def close(self, ids: Mapping[str, OperationId]) -> None:
        """Drop the offers with these ids, and the earlier ones.

        Also those that have yet to arrive.
        """
        with self.lock:
            for name, op_id in ids.items():
                offers = self._sequence(op_id.key).offers
                if name not in offers or offers[name].id <= op_id:
                    offers[name] = Offer(op_id, False)

    def offers(self, op: Operation) -> dict[str, Offer]:
        """Return the open offers for an operation of this worker by follower."""
        with self.lock:
            return {name: offer for name, offer in self._sequence(op.id.key).offers.items() if offer.is_open}

    # ---- on a follower

    def confirm(self, sequence_id: str) -> bool:
        """Return whether an operation still waits."""
        with self.lock:
            op = self._waiting(sequence_id)
            if op is not None:
                op.is_confirmed = True
            return op is not None

    def proceed(self, sequence_id: str, values: dict[str, object]) -> bool:
        """End an operation with the values of all workers. Return whether it still waited."""
        with self.lock:
            op = self._waiting(sequence_id)
            if op is not None:
                op.gathered_objects = values
                op.proceed_signal.set()
            return op is not None

    def fail(self, sequence_id: str, failure: TelegradError) -> None:
        """End an operation with the leader's failure."""
        with self.lock:
            op = self._waiting(sequence_id)
            if op is not None:
                op.failure = failure
                op.proceed_signal.set()

    def _waiting(self, sequence_id: str) -> Operation | None:
        op_id = OperationId.parse(sequence_id)
        operations = self._sequences[op_id.key].operations if op_id is not None and op_id.key in self._sequences else ()
        found = [op for op in operations if op.id == op_id and not op.gathered_objects and op.failure is None]
        return found[0] if found else None

    def _sequence(self, key: tuple[str, tuple[str, ...]]) -> _Sequence:
        return self._sequences.setdefault(key, _Sequence())
