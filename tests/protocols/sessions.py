"""Sessions between the workers of a simulated group, for all explorers.

The rules are those of the engine. A pair of workers has one session at a time. It ends when a worker dies or the link
between two living workers breaks. Each end notices this at its own moment (`notice`), and enters the next session later
(`join`). Until an end notices, what is in flight may arrive; the rest is lost with the session. What an end sends
before it notices is lost. What it sends in the next session waits until the other end has entered that session, too.
"""

from collections.abc import Iterable
from itertools import combinations

Pair = tuple[int, int]


class Sessions:
    """Sessions of each pair of workers, and those that each end is in.

    Args:
        size: Number of workers.
    """

    __slots__ = ("alive", "away", "current", "known")

    def __init__(self, size: int) -> None:
        self.alive = [True] * size
        self.current = [[0] * size for _ in range(size)]  # newest session of a pair, from 0; symmetric
        self.known = [[0] * size for _ in range(size)]  # known[a][b]: the session with b that a is in, -1: none
        self.away: frozenset[int] = frozenset()  # workers on one side of a partition; no session begins across it

    def copy(self) -> "Sessions":
        twin = Sessions.__new__(Sessions)
        twin.alive = self.alive.copy()
        twin.current = [row.copy() for row in self.current]
        twin.known = [row.copy() for row in self.known]
        twin.away = self.away
        return twin

    def key(self) -> tuple[object, ...]:
        return tuple(map(tuple, self.current)), tuple(map(tuple, self.known)), tuple(self.alive), self.away

    # ---- faults

    def cut(self, a: int, b: int) -> None:
        """Break the link of two workers."""
        self.current[a][b] += 1
        self.current[b][a] = self.current[a][b]

    def partition(self, away: Iterable[int]) -> None:
        """Break all links across a partition; no session begins across it before `heal`."""
        self.away = frozenset(away)
        for a in self.away:
            for b in range(len(self.alive)):
                if b not in self.away:
                    self.cut(a, b)

    def heal(self) -> None:
        self.away = frozenset()

    def kill(self, worker: int) -> None:
        self.alive[worker] = False
        for peer in range(len(self.alive)):
            if peer != worker:
                self.cut(worker, peer)

    def restart(self, worker: int) -> None:
        """Start a new process of a dead worker, which learns which workers are dead."""
        self.alive[worker] = True
        self.known[worker] = [
            session if self.alive[peer] and self.may_talk(worker, peer) else -1
            for peer, session in enumerate(self.current[worker])
        ]

    # ---- ends of links

    def intact_links(self) -> list[Pair]:
        return [(a, b) for a, b in combinations(range(len(self.alive)), 2) if self.talks(a, b)]

    def unnoticed(self) -> list[Pair]:
        """Return the ends (worker, peer) of broken links that have not noticed yet."""
        return [
            (me, peer)
            for me, row in enumerate(self.known)
            if self.alive[me]
            for peer, session in enumerate(row)
            if session >= 0 and (session != self.current[me][peer] or not self.alive[peer])
        ]

    def joinable(self) -> list[Pair]:
        """Return the ends (worker, peer) that may enter the next session."""
        return [
            (me, peer)
            for me, row in enumerate(self.known)
            if self.alive[me]
            for peer, session in enumerate(row)
            if session < 0 and self.alive[peer] and self.may_talk(me, peer)
        ]

    def may_talk(self, a: int, b: int) -> bool:
        return (a in self.away) == (b in self.away)

    def notice(self, me: int, peer: int) -> None:
        self.known[me][peer] = -1

    def join(self, me: int, peer: int) -> None:
        self.known[me][peer] = self.current[me][peer]

    # ---- messages

    def is_lost(self, me: int, peer: int) -> bool:
        """Return whether this end has left a session and is in no later one."""
        return self.known[me][peer] < 0

    def session_for(self, me: int, peer: int) -> int | None:
        """Return the session that carries a message; None if it is lost."""
        session = self.known[me][peer]
        return session if self.alive[peer] and session == self.current[me][peer] else None

    def delivers(self, src: int, dst: int, session: int) -> bool:
        """Return whether a message may arrive now: its receiver is in its session."""
        return self.alive[dst] and self.known[dst][src] == session

    def is_over(self, src: int, dst: int, session: int) -> bool:
        """Return whether a message can never arrive."""
        known = self.known[dst][src]
        return not self.alive[dst] or (known != session and (known > session or self.current[dst][src] > session))

    def talks(self, a: int, b: int) -> bool:
        """Return whether both ends are in the same session and its link is intact."""
        current = self.current[a][b]
        return self.alive[a] and self.alive[b] and self.known[a][b] == self.known[b][a] == current
