"""Values that arrive at a worker for operations of several workers.

Each operation has an id that each of its workers computes: its purpose, the names of the workers, the number
of each one's process (`telegrad.protocols.membership.ordinal_of`), and a count that begins again with each combination
of processes. So a worker that comes back needs no count of its previous process.

Workers may learn of a new process at different times. They compare the numbers in an id with those that they know; a
process that has been replaced never comes back, so the largest number of each worker is the current one.
"""

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from telegrad.errors import TelegradError

__all__ = ["AllGatherStates", "Gathering", "OperationId"]


class AllGatherStates:
    """State of one gathering in progress, on one worker.

    Example::

        state = rpc.AllGatherStates()
        assert not state.proceed_signal.is_set()
    """

    def __init__(self) -> None:
        self.gathered_objects: dict[str, object] = {}
        self.proceed_signal: threading.Event = threading.Event()
        self.failure: TelegradError | None = None  # the error with which the leader ended it
        self.is_running: bool = False  # a thread of this worker takes part
        self.is_outdated: bool = False  # the leader begins again, with other processes


class OperationId(NamedTuple):
    """Id of an operation."""

    purpose: str
    names: tuple[str, ...]  # sorted
    ordinals: tuple[int, ...]  # numbers of their processes
    number: int

    def __str__(self) -> str:
        return "|".join((self.purpose, ",".join(self.names), text_of(self.ordinals), str(self.number)))

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        """Purpose and names: what the count belongs to."""
        return self.purpose, self.names

    @classmethod
    def parse(cls, text: str) -> "OperationId | None":
        """Return the id with a text; None for a text that is none."""
        try:
            purpose, names, ordinals, number = text.rsplit("|", 3)
            return cls(purpose, tuple(names.split(",")), ordinals_of(ordinals), int(number))
        except ValueError:
            return None


def text_of(ordinals: Iterable[int]) -> str:
    return ",".join(map(str, ordinals))


def ordinals_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


class _Sequence:
    """Count of the operations with one key."""

    def __init__(self, ordinals: tuple[int, ...]) -> None:
        self.ordinals = ordinals  # that this worker uses
        self.received = ordinals  # the largest ones in messages
        self.number = 0


class Gathering:
    """Operations of one worker, by id.

    Args:
        name: Name of the worker.
        known: Returns the numbers of the newest known processes of some workers.
    """

    def __init__(self, name: str, known: Callable[[tuple[str, ...]], tuple[int, ...]]) -> None:
        self.lock: threading.RLock = threading.RLock()
        self.states: dict[str, AllGatherStates] = {}
        self.name: str = name
        self._known = known
        self._sequences: dict[tuple[str, tuple[str, ...]], _Sequence] = {}

    # ---- called by threads that take part

    def next_id(self, names: Iterable[str], purpose: str) -> OperationId:
        """Return the next id for a set of workers and a purpose; the same on all of them.

        If processes were replaced, the count begins again, but operations of the previous processes come first if
        their results, or failures, are here.
        """
        key = purpose, tuple(sorted(names))
        with self.lock:
            newest = self.newest(key)
            sequence = self._sequences.setdefault(key, _Sequence(newest))
            op = OperationId(*key, sequence.ordinals, sequence.number)
            waiting = self.states.get(str(op))
            if sequence.ordinals != newest and not (waiting and waiting.proceed_signal.is_set()):
                sequence.ordinals, op = newest, OperationId(*key, newest, 0)
            sequence.number = op.number + 1
        return op

    def begin(
        self, names: Iterable[str], purpose: str
    ) -> tuple[OperationId, AllGatherStates, list[tuple[str, set[str]]]]:
        """Take part in the next operation of a set of workers.

        Returns:
            Its id and state; and operations of replaced processes that this worker will not take part in any more, with
            the workers that do.
        """
        with self.lock:
            op = self.next_id(names, purpose)
            state = self.states.setdefault(str(op), AllGatherStates())
            state.is_running = True
            outdated = [
                text
                for text, other in self.states.items()
                if not other.is_running
                and (it := OperationId.parse(text)) is not None
                and it.key == op.key
                and _is_older(it.ordinals, op.ordinals)
            ]
            return op, state, [(text, set(self.states.pop(text).gathered_objects)) for text in outdated]

    def newest(self, key: tuple[str, tuple[str, ...]]) -> tuple[int, ...]:
        """Return the numbers of the newest processes, known or read in messages."""
        known = self._known(key[1])
        with self.lock:
            sequence = self._sequences.get(key)
            return known if sequence is None else _largest(known, sequence.received)

    def finish(self, op: OperationId) -> None:
        """Forget an operation, and what arrives for it from now on."""
        with self.lock:
            self.states.pop(str(op), None)

    # ---- called by handlers

    def receive_ordinals(self, key: tuple[str, tuple[str, ...]], ordinals: tuple[int, ...]) -> None:
        """Take note of the processes that another worker knows."""
        with self.lock:
            sequence = self._sequences.setdefault(key, _Sequence(ordinals))
            if not _is_older(sequence.received, ordinals):
                return
            sequence.received = _largest(sequence.received, ordinals)
            for text, state in self.states.items():
                it = OperationId.parse(text)
                if state.is_running and it is not None and it.key == key:
                    state.proceed_signal.set()

    def collect(self, sequence_id: str, name: str, value: object, names: set[str]) -> str | None:
        """Add the value of a worker, on the leader.

        Returns:
            None; or, if processes in the id have been replaced, the numbers of the newest ones. The worker then begins
            again.

        Raises:
            TelegradError: The worker does not take part, has reported already, or the operation is over.
        """
        op = OperationId.parse(sequence_id)
        if name not in names or (op is not None and name not in op.names):
            taking_part = ", ".join(sorted(names if op is None else op.names))
            raise TelegradError(f"{name} is not expected by leader {self.name}: the operation is of {taking_part}.")
        with self.lock:
            state = self.states.get(sequence_id)
            if op is not None and not (state and state.is_running):
                self.receive_ordinals(op.key, op.ordinals)
                newest = self.newest(op.key)
                if _is_older(op.ordinals, newest):
                    return text_of(newest)
                if state is None and self._is_over(op):
                    raise TelegradError(f"{self.name} has ended this operation without {name}; see its error.")
            state = self.states.setdefault(sequence_id, AllGatherStates())
            if name in state.gathered_objects:
                raise TelegradError(f"{name} reported intent sequence id {sequence_id} twice. ")
            state.gathered_objects[name] = value
            if set(state.gathered_objects) == names:
                state.proceed_signal.set()
        return None

    def proceed(self, sequence_id: str, values: dict[str, object]) -> str | None:
        """Store the values of all workers and end the wait, on a follower.

        Returns:
            None; or, if the values were for a previous process of this worker, the numbers of the newest processes.
        """
        with self.lock:
            state = self._awaited(sequence_id)
            if state is None:
                op = OperationId.parse(sequence_id)
                return text_of(self.newest(op.key)) if op is not None and self._is_for_predecessor(op) else None
            if state.gathered_objects:
                raise TelegradError(f"Termination signal sequence id {sequence_id} got set twice.")
            state.gathered_objects = values
            state.proceed_signal.set()
        return None

    def fail(self, sequence_id: str, failure: TelegradError) -> None:
        """End the wait with the leader's failure, on a follower."""
        with self.lock:
            state = self._awaited(sequence_id)
            if state is not None:
                state.failure = failure
                state.proceed_signal.set()

    def begin_again(self, sequence_id: str, ordinals: tuple[int, ...]) -> None:
        """Begin again with newer processes, on a follower, as the leader does."""
        op = OperationId.parse(sequence_id)
        with self.lock:
            if op is not None:
                self.receive_ordinals(op.key, ordinals)
            state = self.states.get(sequence_id)
            if state is not None and state.is_running:
                state.is_outdated = True
                state.proceed_signal.set()

    def _awaited(self, sequence_id: str) -> AllGatherStates | None:
        """Return the state of an operation; None if it is over for this worker."""
        op = OperationId.parse(sequence_id)
        if op is not None and sequence_id not in self.states:
            if self._is_for_predecessor(op):
                return None
            self.receive_ordinals(op.key, op.ordinals)
            if self._is_over(op) or _is_older(op.ordinals, self._sequences[op.key].ordinals):
                return None
        return self.states.setdefault(sequence_id, AllGatherStates())

    def _is_over(self, op: OperationId) -> bool:
        sequence = self._sequences[op.key]
        return op.ordinals == sequence.ordinals and op.number < sequence.number

    def _is_for_predecessor(self, op: OperationId) -> bool:
        if self.name not in op.names:
            return False
        return op.ordinals[op.names.index(self.name)] < self._known((self.name,))[0]


def _is_older(these: tuple[int, ...], those: tuple[int, ...]) -> bool:
    """Return whether a process in `these` has been replaced, according to `those`."""
    return any(a < b for a, b in zip(these, those, strict=True))


def _largest(these: tuple[int, ...], those: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(max, these, those))
