"""Outbox of one RRef table: effects for the caller, and batches per peer.

Accepts and releases only free memory. No worker waits for them, so they are sent late and in batches. `Add` and `Added`
have a waiting peer and are sent at once. No message goes to a lost peer (guarantee G3): `send`, `accept` and `release`
are the only ways to send, and they check it.
"""

from collections.abc import Mapping, Sequence

from telegrad.protocols.rref_messages import Accept, Effect, Message, Release, RRefId, Send

NOTHING: Sequence[Effect] = ()


class _Batch:
    __slots__ = ("releases", "transfers")

    def __init__(self) -> None:
        self.transfers: list[int] = []
        self.releases: dict[RRefId, int] = {}

    def size(self) -> int:
        return len(self.transfers) + len(self.releases)


class Outbox:
    __slots__ = ("_batches", "_limit", "effects", "epochs", "lost", "strays")

    _batches: dict[int, _Batch]  # always the same object

    def __init__(self, limit: int) -> None:
        self.effects: list[Effect] = []  # since the last `take`
        self._batches = {}
        self._limit = limit
        self.lost: dict[int, str] = {}  # worker -> why; until it joins again
        self.epochs: dict[int, int] = {}  # worker -> losses and returns; distinguishes stale tickets from current ones
        self.strays: int = 0  # messages or drops without an entry; 0 unless peers were lost

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def take(self) -> Sequence[Effect]:
        """Return the effects since the last call, oldest first."""
        effects = self.effects
        if not effects:
            return NOTHING
        self.effects = []
        return effects

    def delivers(self, to: int, epoch: int | None) -> bool:
        """Return whether a message to a peer may arrive.

        `epoch` is that of the message, None for the present one.
        """
        return to not in self.lost and (epoch is None or epoch == self.epochs.get(to, 0))

    def send(self, to: int, message: Message) -> None:
        if to not in self.lost:
            self.effects.append(Send(to, message))

    def accept(self, to: int, transfer: int) -> None:
        if to in self.lost:
            return
        batch = self._batches.get(to)
        if batch is None:
            batch = self._batches[to] = _Batch()
        batch.transfers.append(transfer)
        if batch.size() >= self._limit:
            self._post(to, self._batches.pop(to))

    def release(self, to: int, rref: RRefId, tokens: int) -> None:
        if to in self.lost:
            return
        batch = self._batches.get(to)
        if batch is None:
            batch = self._batches[to] = _Batch()
        batch.releases[rref] = batch.releases.get(rref, 0) + tokens
        if batch.size() >= self._limit:
            self._post(to, self._batches.pop(to))

    def queued(self) -> int:
        return sum(batch.size() for batch in self._batches.values()) if self._batches else 0

    @property
    def batched(self) -> Mapping[int, object]:
        """The batches that wait for `flush`, by peer. Always the same object."""
        return self._batches

    def flush(self) -> None:
        batches = list(self._batches.items())
        self._batches.clear()
        for to, batch in batches:
            self._post(to, batch)

    def forget(self, peer: int, why: str) -> None:
        self._batches.pop(peer, None)
        self.lost[peer] = why
        self.epochs[peer] = self.epochs.get(peer, 0) + 1

    def resume(self, peer: int) -> None:
        """Allow messages to a lost peer.

        It does not get those that were made while it was lost.
        """
        if self.lost.pop(peer, None) is not None:
            self.epochs[peer] += 1

    def _post(self, to: int, batch: _Batch) -> None:
        if batch.transfers:
            self.effects.append(Send(to, Accept(tuple(batch.transfers))))
        if batch.releases:
            self.effects.append(Send(to, Release(tuple(batch.releases.items()))))
