"""Table of the workers of a process."""

import sys
from types import FrameType

from telegrad.worker import live_workers
from telegrad.worker.process_hooks import register, unregister


class ClosedWorker:
    """Worker as the table sees it."""

    closed = True


def test_workers_are_listed_while_others_join() -> None:
    joined: list[ClosedWorker] = []

    def join(_frame: FrameType, _event: str, _arg: object) -> None:
        """Join within each Python function of the listing, as another thread may."""
        joined.append(ClosedWorker())
        register(joined[-1])

    first = ClosedWorker()
    register(first)
    sys.setprofile(join)
    try:
        found = live_workers()
    finally:
        sys.setprofile(None)
    assert first in found
    assert len(joined) > 1
    assert {*joined, first} <= set(live_workers())
    for worker in joined[1:]:
        unregister(worker)
    assert not set(joined[1:]) & set(live_workers())


def test_a_dropped_worker_is_not_in_the_table() -> None:
    before = live_workers()
    register(ClosedWorker())
    assert live_workers() == before
