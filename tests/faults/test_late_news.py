"""News of a loss that comes late, when the successor of the lost process joins."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_helpers import check_clean, shut_down
from process_helpers import TIMEOUT, Actor, actors, call_many, join, state

from telegrad import rpc
from telegrad.testing import eventually
from telegrad.worker import Worker
from telegrad.worker.default_worker import current_worker

# A rank of a static group comes back only if the group was given a secret.
pytestmark = [pytest.mark.openssl, pytest.mark.slow]

OPTIONS = {"secret": "a secret of the tests of late news", "rpc_timeout": TIMEOUT, "local_heartbeat": 0.5}


@pytest.fixture
def four(tmp_path: Path) -> Iterator[list[Actor]]:
    """Workers w0, w1 and w2, and a process that has not joined."""
    with actors(4, tmp_path, method="none") as group:
        for step in [actor.begin(join, actor.name, actor.rank, 3, where(tmp_path), OPTIONS) for actor in group[:3]]:
            step.result()
        yield group


def where(folder: Path) -> str:
    return f"file://{folder}/store"


# ---- steps


def me() -> Worker:
    worker = current_worker()
    assert worker is not None
    return worker


def hold_news() -> None:
    """Let this worker hear of losses late."""
    arrived, may_pass = state["news"] = threading.Event(), threading.Event()
    on_peer_lost = me().on_peer_lost

    def late(*arguments: Any) -> None:
        arrived.set()
        assert may_pass.wait(TIMEOUT)
        on_peer_lost(*arguments)
        state["handled"] = arguments[:2]

    me().on_peer_lost = late  # type: ignore[method-assign]


def has_news() -> bool:
    return bool(state["news"][0].is_set())


def release_news() -> None:
    state["news"][1].set()


def handled() -> tuple[int, int] | None:
    """Return the peer and the incarnation of the loss that has been handled."""
    return state.get("handled")


def incarnation() -> int:
    return me().incarnation


def connected() -> int:
    """Return the incarnation of w1 to which this worker is connected; 0 for none."""
    return int(me().members.connected.get(1, 0))


def lost_names() -> list[str]:
    return list(me().members.lost_names())


def hold_reference(to: str) -> None:
    state["rref"] = rpc.remote(to, dict)
    state["rref"].to_here(timeout=TIMEOUT)


def use_reference() -> Any:
    return state["rref"].to_here(timeout=TIMEOUT)


def drop_reference() -> None:
    del state["rref"]


def owned() -> int:
    return len(me().references.leaks())


def process_of(to: str) -> int:
    return int(rpc.rpc_sync(to, os.getpid, timeout=TIMEOUT))


# ---- tests


def test_the_successor_of_a_process_waits_for_the_news_of_its_end(four: list[Actor], tmp_path: Path) -> None:
    """The references of the old process end, and those of the new one stay."""
    owner, old, other, new = four
    assert owner.do(call_many, "w1", 2) == other.do(call_many, "w1", 2) == 2
    old.do(hold_reference, "w0")
    assert owner.do(owned) == 1
    former = old.do(incarnation)
    owner.do(hold_news)
    old.end()
    eventually(lambda: owner.do(has_news))
    new.name = "w1"
    joining = new.begin(join, "w1", 1, 3, where(tmp_path), OPTIONS)
    eventually(lambda: other.do(connected) > former)
    with pytest.raises(AssertionError, match="takes too long"):
        joining.result(timeout=0.3)
    assert owner.do(handled) is None
    assert owner.do(call_many, "w2", 2) == other.do(call_many, "w0", 2) == 2
    owner.do(release_news)
    joining.result()
    assert owner.do(handled) == (1, former)
    assert owner.do(connected) == new.do(incarnation) > former
    assert owner.do(lost_names) == []
    assert owner.do(owned) == 0
    new.do(hold_reference, "w0")
    assert new.do(use_reference) == {}
    assert owner.do(owned) == 1
    assert owner.do(process_of, "w1") == new.process.pid
    new.do(drop_reference)
    check_clean(owner, new, other)
    shut_down(owner, new, other)
