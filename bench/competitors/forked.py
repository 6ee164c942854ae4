"""Competitors with plain processes as workers, forked by the leader of the group."""

import os
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

from bench.competitors.base import Client, Competitor, Main, Seat, take_seat
from bench.networks import enter
from bench.processes import fork, wait

GOODBYE = 30.0  # seconds for the others to end once worker 0 has


class ForkedCompetitor(Competitor):
    def prepare(self) -> None:
        """Import the packages that a worker needs."""

    @abstractmethod
    def join(self, seat: Seat) -> Client:
        """Join the group; return when calls can be made."""

    def run(self, seats: Sequence[Seat], main: Main) -> None:
        lifeline, held = os.pipe()  # held open by worker 0 alone
        leader = os.getpid()
        pids = [fork(partial(self._work, seat, main, leader, lifeline, held)) for seat in seats]
        os.close(held)
        for rank, pid in enumerate(pids):
            status = wait(pid, 24 * 3600 if rank == 0 else GOODBYE)
            if status is None:
                raise RuntimeError(f"worker {rank} does not end")
            if status == 1:
                raise SystemExit(1)  # its own output has the reason
            if status:
                raise RuntimeError(f"worker {rank} ended with status {status}")

    def _work(self, seat: Seat, main: Main, leader: int, lifeline: int, held: int) -> None:
        if seat.rank > 0:
            os.close(held)
        if seat.places:
            enter(seat.places[seat.rank].namespace)
        client = take_seat(self.join(seat))
        client.leader = leader
        if seat.rank == 0:
            main(client)
            client.leave()
        else:
            client.serve(lifeline)
