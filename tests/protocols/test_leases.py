"""Leases as an observer sees them, and which members a newcomer has to reach."""

from itertools import product

import pytest

from telegrad.protocols.joining import Newcomer, Refusal
from telegrad.protocols.leases import (
    NOT_RENEWED,
    Timing,
    Watch,
    holder_of,
    lease_value,
    process_of,
    released_value,
    to_observe,
)

RELEASED = released_value(1)
TIMING = Timing(8.0)  # renewals each second, silence 1.2 s


def test_times_follow_from_the_lifetime() -> None:
    assert (TIMING.renewal, TIMING.silence) == (1.0, pytest.approx(1.2))
    assert Timing(10.0).silence < 2, "a newcomer waits for a silent member less than 2 s, by default"


def observed(watch: Watch, until: float, value: str) -> Watch:
    """Observe a lease with each renewal of the observer."""
    now = watch.begun
    while now < until:
        now += 1.0
        watch.observe(now, value)
    return watch


def test_a_lease_expires_without_renewals() -> None:
    watch = observed(Watch(TIMING, 100.0, "1"), 107.0, "1")
    assert not watch.has_expired(107.9)
    assert watch.has_expired(108.0)
    watch.observe(108.0, "2")
    assert not watch.has_expired(115.9)
    assert watch.has_expired(116.0)


@pytest.mark.parametrize("lifetime", [2.0, 32.0])
def test_the_lifetime_is_that_of_the_member(lifetime: float) -> None:
    """An observer with other options neither removes a live member nor waits longer."""
    lease = lease_value(1, "process", 0, lifetime)
    watch = observed(Watch(TIMING, 100.0, lease), 100.0 + lifetime - 1.0, lease)
    assert not watch.has_expired(100.0 + lifetime - 0.1)
    assert watch.has_expired(100.0 + lifetime)
    assert watch.is_silent(100.0 + 1.2 * lifetime / 8 + 0.01)
    assert not watch.is_silent(100.0 + 1.2 * lifetime / 8 - 0.01)


@pytest.mark.parametrize("lifetime", [0, -1.0, float("nan"), float("inf")])
def test_lifetimes_that_cannot_be_used(lifetime: float) -> None:
    watch = Watch(TIMING, 100.0, lease_value(1, "process", 0, lifetime))
    assert (watch.has_expired(107.9), watch.has_expired(108.0)) == (False, True)


def losses_of(dead: int, members: int, renewed: int) -> tuple[list[float], int]:
    """Observe members of which the first ones die after a number of renewals.

    Returns:
        When each was lost, in lifetimes after its last renewal, and how many were observed after that.
    """
    left = [(number, 1) for number in range(members)]
    watches: dict[tuple[int, int], Watch] = {}
    losses: list[float] = []
    now, last = 100.0, 100.0 + renewed
    while now < last + 10 * TIMING.lifetime:
        now += TIMING.renewal
        observed = to_observe(left, watches, now)
        watches = {key: watch for key, watch in watches.items() if key in observed}
        for key in observed:
            value = str(min(now, last) if key[0] < dead else now)
            watches.setdefault(key, Watch(TIMING, now, value)).observe(now, value)
            if watches[key].has_expired(now):
                left.remove(key)
                losses.append((now - last) / TIMING.lifetime)
    return losses, len(to_observe(left, watches, now))


@pytest.mark.parametrize("renewed", [0, 20])
@pytest.mark.parametrize("dead", [1, 2, 8, 32])
def test_members_that_die_at_once_are_lost_at_once(dead: int, renewed: int) -> None:
    losses, observed = losses_of(dead, 100, renewed)
    assert len(losses) == dead
    assert max(losses) <= (2 if dead <= 8 else 2.5)
    assert observed == 2, "a healthy group costs two observations"


def test_an_observer_that_was_late_begins_again() -> None:
    watch = observed(Watch(TIMING, 100.0, "1"), 107.0, "1")
    watch.observe(150.0, "1")
    assert not watch.has_expired(150.0)
    assert not watch.is_silent(151.1)
    assert watch.is_silent(151.3)
    assert watch.has_expired(158.0)


@pytest.mark.parametrize("value", [None, RELEASED])
def test_a_lease_that_has_ended(value: str | None) -> None:
    assert Watch(TIMING, 0.0, value).has_expired(0.0)
    watch = Watch(TIMING, 0.0, "1")
    watch.observe(0.5, value)
    assert watch.ended
    assert (watch.has_expired(0.5), watch.renewals, watch.released) == (True, 0, value == RELEASED)


def test_silence_begins_with_the_observation() -> None:
    watch = Watch(TIMING, 100.0, "1")
    assert not watch.is_silent(101.1)
    assert watch.is_silent(101.3)
    watch.observe(101.0, "2")
    assert not watch.is_silent(150.0)


def newcomer(*members: int) -> Newcomer:
    found = Newcomer(TIMING)
    for member in members:
        assert found.require(member, 0.0, "1")
        assert not found.require(member, 0.0, "1")
    return found


def test_a_newcomer_waits_for_each_live_member() -> None:
    one = newcomer(0, 1)
    one.connected(0)
    one.observe(1, 1.0, "2")
    assert (one.judge(50.0), one.waiting_for()) == (None, [1])  # alive: the handshake may be late
    one.connected(1)
    assert (one.judge(50.0), one.waiting_for(), one.silent) == (None, [], set())
    assert not one.require(1, 60.0, "5")


def test_a_refusal_ends_the_join_at_once() -> None:
    one = newcomer(0)
    one.failed(0, "the group's secret does not match", refused=True)
    assert one.judge(0.0) == Refusal(0, "the group's secret does not match")


def test_an_unreachable_member_that_renews_its_lease_ends_the_join() -> None:
    one = newcomer(0)
    one.failed(0, "connection refused", refused=False)
    assert one.judge(0.5) is None
    one.observe(0, 1.0, "2")
    assert one.judge(1.0) == Refusal(0, "connection refused")


@pytest.mark.parametrize("fails", [False, True])
def test_a_silent_member_delays_the_join_for_less_than_two_renewals(fails: bool) -> None:
    one = newcomer(0)
    if fails:
        one.failed(0, "connection refused", refused=False)
    one.observe(0, 1.0, "1")
    assert (one.judge(1.1), one.waiting_for()) == (None, [0])
    assert (one.judge(1.3), one.waiting_for(), one.silent) == (None, [], {0})
    one.connected(0)
    assert one.silent == set()


def test_a_value_that_the_member_has_not_written_is_no_news() -> None:
    """The lease is neither prolonged nor ended."""
    watch = observed(Watch(TIMING, 100.0, "1"), 107.0, NOT_RENEWED)
    assert (watch.value, watch.renewals, watch.ended, watch.has_expired(107.9)) == ("1", 0, False, False)
    assert watch.has_expired(108.0)
    watch.observe(108.0, "2")
    assert (watch.renewals, watch.has_expired(108.0)) == (1, False)


def test_a_value_that_is_written_again_is_no_news() -> None:
    """Another program that has seen old values keeps no member alive."""
    values = [lease_value(7, "p", count) for count in range(3)]
    watch = Watch(TIMING, 100.0, values[2])
    for at in range(1, 8):
        watch.observe(100.0 + at, values[at % 2])
    assert (watch.renewals, watch.has_expired(107.9), watch.has_expired(108.0)) == (0, False, True)
    watch.observe(107.5, released_value(7))
    watch.observe(107.6, values[2])
    assert watch.released
    watch.observe(107.7, lease_value(8, "p", 0))
    assert (watch.released, watch.renewals) == (False, 1)


def test_the_holder_of_a_lease() -> None:
    assert (holder_of(lease_value(7, "p", 3)), process_of(lease_value(7, "p", 3))) == (7, "p")
    assert (holder_of(released_value(7)), holder_of(None), holder_of(NOT_RENEWED)) == (7, -1, -1)
    for nonsense in ("nonsense", "[]", "{}", '["a"]', "5", "[Infinity]", "[" * 100_000):
        assert (holder_of(nonsense), process_of(nonsense)) == (-1, "")


def test_a_newcomer_waits_for_a_member_without_a_lease_as_for_a_silent_one() -> None:
    """The store may have deleted the lease of a live member that holds the GIL."""
    one = newcomer(0)
    one.failed(0, "connection refused", refused=False)
    one.observe(0, 0.1, None)
    assert (one.judge(0.1), one.waiting_for()) == (None, [0])
    one.observe(0, 0.5, "2")
    assert one.judge(0.5) == Refusal(0, "connection refused")


def test_a_member_that_has_left_is_not_awaited() -> None:
    one = newcomer(0)
    one.failed(0, "connection refused", refused=False)
    one.observe(0, 0.1, RELEASED)
    assert (one.judge(0.1), one.waiting_for(), one.silent) == (None, [], set())


def test_every_order_of_reports_gives_one_verdict() -> None:
    """A live member is never excused, and a dead one never ends the join."""
    for renews, reports in product((False, True), product("cfro-", repeat=4)):
        one = newcomer(0)
        verdict, connected, refused = None, False, False
        for step, report in enumerate(reports):
            now = 0.7 * (step + 1)
            if report == "c":
                one.connected(0)
                connected = True
            elif report in "fr":
                one.failed(0, "no", refused=report == "r")
                refused = refused or (report == "r" and 0 in one.waiting_for())
            elif report == "o":
                one.observe(0, now, str(step + 2) if renews else "1")
            verdict = one.judge(now)
            if verdict is not None or not one.waiting_for():
                break
        done = not one.waiting_for() and verdict is None
        if verdict is not None:
            assert refused or (renews and "o" in reports), reports
        if done:
            assert connected or 0 in one.silent, reports
