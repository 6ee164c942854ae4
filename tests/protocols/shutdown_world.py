"""Model of shutdowns on links that break between living workers.

It has calls with replies, and the counters of the worker. Processes die or leave with a goodbye, and others come back.
"""

import random
from collections import Counter
from typing import Any

from sessions import Sessions

from telegrad.protocols.shutdown import Count, Counters, Done, Drain, Finished, GaveUp, Pause, Send

TASTES = ("deliver", "reply", "call", "arrive", "notice", "join", "leave")


class Broken(AssertionError):
    """An invariant does not hold."""


class World:
    """Workers that call each other and shut down.

    Counters are those of the worker (worker/membership/shutdown_barrier.py): received requests, and what is in
    progress.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(f"shutdown {seed}")
        self.size = rng.randint(2, 4)
        self.sessions = Sessions(self.size)
        self.drains = {w: Drain(w, range(self.size)) for w in range(self.size)}
        self.work = {w: rng.randint(0, 3) for w in range(self.size)}  # calls that the program still makes
        self.calls: dict[int, tuple[int, int]] = {}  # number -> (caller, callee), until the caller has the result
        self.handlers: list[tuple[int, int]] = []  # (worker, number of the call)
        self.received: Counter[int] = Counter()
        self.net: list[tuple[int, int, int, Any]] = []
        self.paused: set[int] = set()
        self.numbers = 0
        self.kills, self.cuts, self.splits = (rng.choice((0, 0, 1, 2)) for _ in range(3))
        self.returns = rng.choice((0, 1, 2))
        self.faulty = False
        self.goodbyes: set[tuple[int, int, int]] = set()  # (worker, peer, session) that ends with a goodbye of the peer
        self.notified: set[int] = set()  # workers that another one has notified of the end

    def actions(self) -> list[tuple[Any, ...]]:
        live, sessions = self.drains, self.sessions
        found: list[tuple[Any, ...]] = []
        found += [("deliver", packet) for packet in self.net if sessions.delivers(*packet[:3])]
        found += [("reply", handler) for handler in self.handlers]
        found += [("resume", w) for w in sorted(self.paused)]
        found += [("call" if self.work[w] else "arrive", w) for w, drain in live.items() if not drain.arrived]
        found += [("notice", *ends) for ends in sessions.unnoticed()]
        found += [("join", *ends) for ends in sessions.joinable()]
        found += [("heal",)] if sessions.away else []
        found += [("leave", w) for w, drain in live.items() if drain.over is not None]
        return found

    def faults(self) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        if self.cuts:
            found += [("cut", *pair) for pair in self.sessions.intact_links()]
        if self.kills and len(self.drains) > 1:
            found += [(verb, w) for w in self.drains for verb in ("kill", "quit")]
        if self.returns and any(drain.over is None for drain in self.drains.values()):
            found += [("come_back", w) for w in range(self.size) if w not in self.drains]
        if self.splits and not self.sessions.away:
            found += [("split", w) for w in self.drains]
        return found

    # ---- events

    def deliver(self, packet: tuple[int, int, int, Any]) -> None:
        self.net.remove(packet)
        src, dst, _, (kind, body) = packet
        if kind == "call":
            self.received[dst] += 1
            self.handlers.append((dst, body))
        elif kind == "reply":
            self.calls.pop(body, None)
        else:
            if isinstance(body, Finished):
                self.notified.add(dst)
            self.carry_out(dst, self.drains[dst].handle(src, body))

    def call(self, w: int) -> None:
        self.work[w] -= 1
        self.make_call(w, self.rng.choice([peer for peer in range(self.size) if peer != w]))

    def make_call(self, w: int, callee: int) -> None:
        if self.sessions.is_lost(w, callee):
            return  # the call fails at once
        self.numbers += 1
        self.calls[self.numbers] = w, callee
        self.post(w, callee, ("call", self.numbers))

    def reply(self, handler: tuple[int, int]) -> None:
        """End a handler; some call another worker last."""
        self.handlers.remove(handler)
        worker, number = handler
        if self.rng.random() < 0.3:
            self.make_call(worker, self.rng.choice([peer for peer in range(self.size) if peer != worker]))
        if number in self.calls and self.calls[number][1] == worker:
            self.post(worker, self.calls[number][0], ("reply", number))

    def arrive(self, w: int) -> None:
        self.carry_out(w, self.drains[w].arrive())

    def resume(self, w: int) -> None:
        self.paused.discard(w)
        self.carry_out(w, self.drains[w].resume())

    def notice(self, me: int, peer: int) -> None:
        orderly = (me, peer, self.sessions.known[me][peer]) in self.goodbyes
        self.sessions.notice(me, peer)
        self.drop_packets()
        for number, ends in list(self.calls.items()):
            if ends == (me, peer):
                del self.calls[number]
        self.handlers = [(w, n) for w, n in self.handlers if w != me or self.calls.get(n, (peer,))[0] != peer]
        self.carry_out(me, self.drains[me].peer_gone(peer, orderly))

    def join(self, me: int, peer: int) -> None:
        self.sessions.join(me, peer)
        self.carry_out(me, self.drains[me].peer_back(peer))

    def heal(self) -> None:
        self.sessions.heal()

    def cut(self, a: int, b: int) -> None:
        self.cuts -= 1
        self.sessions.cut(a, b)

    def split(self, w: int) -> None:
        self.splits -= 1
        self.sessions.partition({w})

    def leave(self, w: int) -> None:
        for peer in self.drains:
            self.goodbyes.add((peer, w, self.sessions.known[peer][w]))
        self.end(w)

    def quit(self, w: int) -> None:
        """End a process with a goodbye before its shutdown is over."""
        self.kills -= 1
        self.leave(w)

    def come_back(self, w: int) -> None:
        """Start a new process of a worker; to it, those that it does not reach are lost."""
        self.returns -= 1
        self.sessions.restart(w)
        self.drains[w] = drain = Drain(w, range(self.size))
        self.work[w] = self.rng.randint(0, 3)
        self.received[w] = 0
        self.notified.discard(w)
        for peer in range(self.size):
            if peer != w and self.sessions.is_lost(w, peer):
                self.carry_out(w, drain.peer_gone(peer))

    def kill(self, w: int) -> None:
        self.kills -= 1
        self.end(w)

    def end(self, w: int) -> None:
        self.sessions.kill(w)
        del self.drains[w]
        self.paused.discard(w)
        self.handlers = [handler for handler in self.handlers if handler[0] != w]
        self.calls = {number: ends for number, ends in self.calls.items() if ends[0] != w}
        self.drop_packets()

    def drop_packets(self) -> None:
        self.net = [packet for packet in self.net if not self.sessions.is_over(*packet[:3])]

    def post(self, src: int, dst: int, body: Any) -> None:
        """Send in the session that this end is in; without one, in the next."""
        known = self.sessions.known[src][dst]
        session = self.sessions.current[src][dst] if known < 0 else known
        if dst in self.drains and session == self.sessions.current[src][dst]:
            self.net.append((src, dst, session, body))

    def carry_out(self, w: int, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.post(w, effect.to, ("drain", effect.message))
            elif isinstance(effect, Count):
                pending = sum(worker == w for worker, _ in self.handlers)
                pending += sum(caller == w for caller, _ in self.calls.values())
                counts = {w: self.received[w]}
                self.carry_out(w, self.drains[w].counted(*effect, Counters(counts, counts, pending)))
            elif isinstance(effect, Pause):
                self.paused.add(w)
            elif isinstance(effect, Done) and not self.faulty and (self.calls or self.handlers):
                raise Broken(f"S1: worker {w} is done, calls are in progress: {self.calls} {self.handlers}")
            elif isinstance(effect, Done) and w not in self.notified and (absent := self.absent(w)):
                raise Broken(f"S3: worker {w} ends the shutdown without {absent}, which it is connected to")
            elif isinstance(effect, GaveUp):
                raise Broken(f"worker {w} gave up without a deadline")

    def absent(self, w: int) -> list[int]:
        """Return the workers in a session with `w` that have not begun to shut down."""
        return [peer for peer, drain in self.drains.items() if self.sessions.talks(w, peer) and not drain.arrived]

    def settled(self) -> None:
        for w, drain in self.drains.items():
            if drain.over is None:
                raise Broken(f"S2: worker {w} waits forever; it waits for {drain.missing()}, led by {drain.leader}")


def wander(seed: int, limit: int = 20_000) -> int:
    """Run one random schedule to its end; return its length."""
    world = World(seed)
    rng = world.rng
    trouble = rng.choice((0.01, 0.05, 0.2))
    hurry = {verb: 4.0 ** rng.uniform(-2, 2) for verb in TASTES}
    trace: list[tuple[Any, ...]] = []
    try:
        while actions := world.actions():
            faults = world.faults()
            if faults and rng.random() < trouble:
                action = rng.choice(faults)
                world.faulty = True
            else:
                action = rng.choices(actions, [hurry.get(action[0], 1.0) for action in actions])[0]
            trace.append(action)
            getattr(world, action[0])(*action[1:])
            if len(trace) > limit:
                raise Broken(f"S2: no end after {limit} steps")
        world.settled()
    except Exception as failure:
        failure.add_note(f"seed {seed}, trace = {trace[-40:]}")
        raise
    return len(trace)
