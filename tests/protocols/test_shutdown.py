"""Graceful shutdown: every interleaving of three workers, with nested calls."""

import copy
from typing import Any

import pytest

from telegrad.protocols import shutdown
from telegrad.protocols.shutdown import Ask, Count, Counters, Done, Drain, GaveUp, Missing, Pause, Ready, Report, Send
from telegrad.worker.membership.shutdown_barrier import ShutdownBarrier

Tree = tuple[Any, ...]  # (callee, *trees that its handler calls)

REPLY = "reply"


class World:
    """Workers with calls, their drains, and a network that delivers in any order."""

    def __init__(self, work: dict[int, tuple[Tree, ...]], mortal: tuple[int, ...] = (), size: int = 3) -> None:
        self.drains = {w: Drain(w, range(size)) for w in range(size)}
        self.work = {w: list(work.get(w, ())) for w in range(size)}
        self.sent = {w: [0] * size for w in range(size)}
        self.handled = {w: [0] * size for w in range(size)}
        self.handlers: list[tuple[int, int, Tree]] = []  # running: (worker, caller, calls to make)
        self.net: list[tuple[int, int, Any]] = []
        self.paused: set[int] = set()
        self.mortal = mortal
        self.noticed: set[tuple[int, int]] = set()
        self.died = False

    def actions(self) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = [("deliver", place) for place in range(len(self.net))]
        found += [("handle", handler) for handler in dict.fromkeys(self.handlers)]
        found += [("resume", w) for w in self.paused]
        for w, drain in self.drains.items():
            if not drain.arrived:
                found.append(("call", w) if self.work[w] else ("arrive", w))
        if not self.died:
            found += [("kill", w) for w in self.mortal]
        else:
            dead = next(w for w in self.sent if w not in self.drains)
            found += [("notice", w, dead) for w in self.drains if (w, dead) not in self.noticed]
        return found

    def do(self, verb: str, *args: Any) -> None:
        getattr(self, verb)(*args)

    def deliver(self, place: int) -> None:
        src, dst, body = self.net.pop(place)
        if type(body) is tuple:  # a call, not a named tuple
            self.handlers.append((dst, src, body))
        else:
            self.carry_out(dst, self.drains[dst].handle(src, body))

    def send_call(self, src: int, tree: Tree) -> None:
        self.sent[src][tree[0]] += 1
        if tree[0] in self.drains:
            self.net.append((src, tree[0], tree[1:]))

    def call(self, w: int) -> None:
        self.send_call(w, self.work[w].pop())

    def handle(self, handler: tuple[int, int, Tree]) -> None:
        """Let a running handler make its next call, or end."""
        self.handlers.remove(handler)
        worker, caller, calls = handler
        if calls:
            self.send_call(worker, calls[0])
            self.handlers.append((worker, caller, calls[1:]))
        else:
            self.handled[worker][caller] += 1

    def arrive(self, w: int) -> None:
        self.carry_out(w, self.drains[w].arrive())

    def resume(self, w: int) -> None:
        self.paused.discard(w)
        self.carry_out(w, self.drains[w].resume())

    def kill(self, w: int) -> None:
        self.died = True
        del self.drains[w]
        self.net = [packet for packet in self.net if packet[1] != w]
        self.handlers = [handler for handler in self.handlers if handler[0] != w]
        self.paused.discard(w)

    def notice(self, w: int, dead: int) -> None:
        self.noticed.add((w, dead))
        self.net = [packet for packet in self.net if packet[:2] != (dead, w)]
        self.carry_out(w, self.drains[w].peer_gone(dead))

    def carry_out(self, w: int, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                assert (w, effect.to) not in self.noticed, "a message is sent to a dead worker"
                if effect.to in self.drains:
                    self.net.append((w, effect.to, effect.message))
            elif isinstance(effect, Count):
                self.carry_out(w, self.drains[w].counted(*effect, self.counters(w)))
            elif isinstance(effect, Pause):
                self.paused.add(w)
            elif isinstance(effect, Done):
                busy = self.handlers or any(type(body) is tuple for _, _, body in self.net) or any(self.work.values())
                assert not busy or self.died, "Done only when all work is"

    def counters(self, w: int) -> Counters:
        pending = sum(handler[0] == w for handler in self.handlers)
        return Counters(dict(enumerate(self.sent[w])), dict(enumerate(self.handled[w])), pending)

    def fingerprint(self) -> Any:
        newest = max((drain._round for drain in self.drains.values()), default=0)  # rounds matter relative to it

        def plain(thing: Any) -> Any:
            if isinstance(thing, (Ask, Report)):
                return type(thing).__name__, newest - thing.round, repr(thing[1:])
            return repr(thing)

        drains = [
            (w, d.arrived, d.live, d._ready, d._running, d._round and newest - d._round, d._reports, d._before, d.over)
            for w, d in self.drains.items()
        ]
        net = sorted(repr((src, dst, plain(body))) for src, dst, body in self.net)
        return repr((drains, net, sorted(self.handlers), self.work, self.handled, self.paused, sorted(self.noticed)))


class WorldWithReplies(World):
    """Workers that count as `ShutdownBarrier` does: received calls, pending calls."""

    def deliver(self, place: int) -> None:
        if self.net[place][2] == REPLY:
            self.net.pop(place)
        else:
            super().deliver(place)

    def handle(self, handler: tuple[int, int, Tree]) -> None:
        super().handle(handler)
        worker, caller, calls = handler
        if not calls:
            self.net.append((worker, caller, REPLY))

    def counters(self, w: int) -> Counters:
        running = sum(handler[0] == w for handler in self.handlers)
        received = {w: sum(self.handled[w]) + running}
        replied = sum(handled[w] for handled in self.handled.values())
        replied -= sum(dst == w and body == REPLY for _, dst, body in self.net)
        return Counters(received, received, running + sum(self.sent[w]) - replied)


def explore(start: World) -> int:
    seen = {start.fingerprint()}
    frontier = [start]
    while frontier:
        world = frontier.pop()
        actions = world.actions()
        if all(action[0] == "kill" for action in actions):
            for drain in world.drains.values():
                assert isinstance(drain.over, Done), "all workers reach Done"
                assert set(drain.over.lost) <= set(world.sent) - set(world.drains), "only the dead are reported as lost"
        for action in actions:
            after = copy.deepcopy(world)
            after.do(*action)
            mark = after.fingerprint()
            if mark not in seen:
                seen.add(mark)
                frontier.append(after)
    return len(seen)


NESTED = {1: ((2, (0, (1,))),)}  # 1 calls 2, its handler calls 0, and the handler of that calls 1
HOPS = {1: ((0, (1, (0, (1,)))),)}  # each handler calls the other worker last
NONE: dict[int, tuple[Tree, ...]] = {}


def test_two_workers_with_nested_calls() -> None:
    assert explore(World({1: ((0, (1,)),)}, size=2)) > 20


def test_without_work() -> None:
    assert explore(World(NONE)) > 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("work", [NESTED, {1: ((2, (1,)),), 2: ((0,),)}], ids=["nested", "crossing"])
def test_three_workers(work: dict[int, tuple[Tree, ...]]) -> None:
    assert explore(World(work)) > 1000


@pytest.mark.parametrize("work", [NONE, {1: ((2,),)}], ids=["idle", "busy"])
def test_any_worker_may_die(work: dict[int, tuple[Tree, ...]]) -> None:
    assert explore(World(work, mortal=(0, 1, 2))) > 200


def test_calls_that_no_round_finds_in_progress() -> None:
    """The calls hop to the worker that a round has asked already, in both rounds."""
    assert explore(WorldWithReplies(HOPS, size=2)) > 1000


@pytest.mark.parametrize("rule", ["pairs", "ready"])
def test_each_rule_is_needed(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """Remove a rule: the explorer finds a shutdown before the end of work."""
    if rule == "pairs":
        monkeypatch.setattr(shutdown, "balanced", lambda reports: not any(c.pending for c in reports.values()))
    else:
        advance = Drain._advance

        def hasty(self: Drain) -> list[Any]:
            self._ready = set(self.live)
            return advance(self)

        monkeypatch.setattr(Drain, "_advance", hasty)
    work = {1: ((0, (1,)),)}
    with pytest.raises(AssertionError, match="Done only when all work is"):
        explore(World(work, size=2))


def test_pending_work_without_a_call_delays_the_shutdown() -> None:
    alone = Drain(0, [0])
    alone.arrive()
    assert alone.counted(0, 1, Counters({}, {}, 1)) == [Pause()]
    assert alone.resume() == [Count(0, 2)]
    alone.counted(0, 2, Counters({}, {}, 0))
    assert alone.counted(0, 3, Counters({}, {}, 0)) == [Done(())]


def test_timeout_reports_the_missing_workers() -> None:
    drains = [Drain(w, range(3)) for w in range(3)]
    drains[0].arrive()
    drains[0].handle(1, Ready())
    assert drains[0].missing() == (2,)
    assert drains[0].expire() == [Send(1, Missing((2,))), GaveUp((2,))]
    assert drains[0].expire() == []


@pytest.mark.parametrize("first", ["missing", "goodbye"])
def test_waiting_worker_learns_the_missing_workers_when_the_leader_times_out(first: str) -> None:
    """The leader's last message and its leaving may be processed in either order."""
    follower = Drain(1, range(4))
    follower.arrive()
    follower.expire()
    if first == "missing":
        assert follower.handle(0, Missing((3,))) == [GaveUp((3,))]
    else:
        assert follower.peer_gone(0, orderly=True) == [GaveUp((2, 3))]


def test_next_leader_is_asked_when_the_first_has_left() -> None:
    follower = Drain(2, range(4))
    follower.arrive()
    follower.expire()
    assert follower.peer_gone(0, orderly=True) == [Send(1, Ready()), Send(1, shutdown.MissingQuery())]
    assert follower.expire() == [GaveUp((1,))]


def test_a_follower_asks_the_leader_for_the_missing_workers() -> None:
    leader, follower = Drain(0, range(4)), Drain(1, range(4))
    leader.arrive()
    leader.handle(1, Ready())
    [ready] = follower.arrive()
    assert ready == Send(0, Ready())
    [who] = follower.expire()
    [answer] = leader.handle(1, who.message)
    assert answer == Send(1, Missing((2, 3)))
    assert follower.handle(0, answer.message) == [GaveUp((2, 3))]


def test_a_leader_that_does_not_reply_is_missing() -> None:
    follower = Drain(1, range(2))
    follower.arrive()
    follower.expire()
    assert follower.expire() == [GaveUp((0,))]


def test_a_leader_that_dies_while_asked_is_missing() -> None:
    follower = Drain(2, range(3))
    follower.arrive()
    follower.expire()
    assert follower.peer_gone(0) == [GaveUp((0,))]


def test_workers_without_report_are_missing() -> None:
    leader = Drain(0, range(3))
    leader.arrive()
    leader.handle(1, Ready())
    assert leader.handle(2, Ready()) == [Count(0, 1), Send(1, Ask(1)), Send(2, Ask(1))]
    leader.counted(0, 1, Counters({}, {}, 0))
    leader.handle(2, Report(1, Counters({}, {}, 0)))
    assert leader.expire()[-1] == GaveUp((1,))


def test_dead_workers_are_left_out_and_reported() -> None:
    leader = Drain(0, range(3))
    leader.arrive()
    leader.handle(2, Ready())
    leader.peer_gone(1)
    for number in (1, 2):
        leader.counted(0, number, Counters({1: 5}, {}, 0))  # calls to dead workers are not compared
        effects = leader.handle(2, Report(number, Counters({}, {1: 1}, 0)))
    assert effects[-1] == Done((1,))


def test_workers_that_left_are_not_reported_as_lost() -> None:
    drain = Drain(0, range(2))
    drain.peer_gone(1, orderly=True)
    assert drain.arrive() == [Count(0, 1)]
    drain.counted(0, 1, Counters({}, {}, 0))
    assert drain.counted(0, 2, Counters({}, {}, 0)) == [Done(lost=(), left=(1,))]


def test_a_new_leader_learns_that_it_is_over() -> None:
    """Lose the leader after it notified one member, but not the next leader."""
    told, heir = Drain(2, range(3)), Drain(1, range(3))
    heir.arrive()
    told.arrive()
    told.handle(0, shutdown.Finished(()))
    heir.peer_gone(0)
    [count, ask] = heir.handle(2, Ready())
    assert isinstance(count, Count)
    [answer] = told.handle(1, ask.message)
    assert heir.handle(2, answer.message) == [Done(())]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_any_of_four_workers_may_die() -> None:
    assert explore(World(NONE, mortal=(0, 1, 2, 3), size=4)) > 2000


def test_a_request_between_two_rounds_delays_the_shutdown() -> None:
    """Two idle moments are one idle time only if no request was received between them."""
    activity = iter([(1, 0), (2, 0), (2, 0)])  # (received requests, pending work)
    barrier = ShutdownBarrier(
        0, lambda peers: None, lambda peer, message: None, lambda delay, run: None, lambda: next(activity)
    )
    assert barrier.run(timeout=10, last=False) == Done(())
    assert not list(activity)


def test_a_returned_worker_is_waited_for() -> None:
    leader = Drain(0, range(2))
    leader.peer_gone(1)
    assert leader.peer_back(1) == []
    assert leader.arrive() == []
    assert leader.missing() == (1,)
    assert leader.handle(1, Ready()) == [Count(0, 1), Send(1, Ask(1))]
