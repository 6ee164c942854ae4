"""Model of backward passes over small programs.

Every `PassSchedule` is real; local graphs and the network are modeled. A program is a list of sends in the order of the
forward pass. Each send names the earlier messages that its tensors depend on. This gives each worker's recvs and
sources, and those that the roots reach.
"""

import copy
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

from sessions import Sessions

from telegrad.protocols.backward import PassSchedule
from telegrad.protocols.backward_messages import (
    FINAL,
    ROOT,
    Finished,
    Gradients,
    Group,
    Layout,
    Run,
    Send,
)
from telegrad.protocols.backward_root import Ledger


class Broken(AssertionError):
    """An invariant does not hold."""


def check(holds: object, name: str, what: str) -> None:
    if not holds:
        raise Broken(f"{name}: {what}")


class Sent(NamedTuple):
    src: int
    dst: int
    uses: tuple[int, ...] = ()  # numbers of earlier sends, all received by src
    leaf: bool = False  # it depends on a parameter of src, too


class Program(NamedTuple):
    workers: int
    sends: tuple[Sent, ...]
    root: int
    loss: tuple[int, ...]  # the sends received by `root` that the loss uses
    leaf: bool = False  # the loss depends on a parameter of the root
    mortal: tuple[int, ...] = ()  # one of them may die
    failing: tuple[tuple[int, int], ...] = ()  # (worker, stage): the stage raises
    shared: bool = True  # all sends of one worker use the same parameter
    subgraphs: bool = False  # the local graphs are found in subgraphs, as gradients and marks arrive for them
    cuts: int = 0  # links between living workers that break
    walls: tuple[tuple[int, int], ...] = ()  # (a, b): what a sends to b is refused until they have a link

    def takes_part(self) -> frozenset[int]:
        found: set[int] = set()
        todo = list(self.loss)
        while todo:
            send = todo.pop()
            if send not in found:
                found.add(send)
                todo += self.sends[send].uses
        return frozenset(found)


class Local:
    """Model of a worker's local graph, as far as the schedule needs it."""

    def __init__(self, program: Program, me: int) -> None:
        uses = {number: sent.uses for number, sent in enumerate(program.sends) if sent.src == me}
        leafy = {number for number in uses if program.sends[number].leaf}
        if me == program.root:
            uses[ROOT] = program.loss
            if program.leaf:
                leafy.add(ROOT)
        self.in_subgraphs = program.subgraphs
        self.uses = uses
        if program.subgraphs:
            self.sources: dict[int, int] = {}
            self.groups: list[Group] = []
            self.final: tuple[tuple[int, int], ...] = ()
            self.recvs = {number: sent.src for number, sent in enumerate(program.sends) if sent.dst == me}
            self.leafy_sends = leafy
            self.leafy = self.arrived = 0
            self.is_disjoint = False
            self.reported = 0, 0
            self.ran: list[int] = []
            return
        self.sources = {send: bit for bit, send in enumerate(sorted(uses))}
        self.leafy = sum(1 << self.sources[send] for send in leafy)
        masks: dict[int, list[tuple[int, int]]] = {}
        for number, sent in enumerate(program.sends):
            mask = sum(1 << bit for send, bit in self.sources.items() if number in uses[send])
            if sent.dst == me and mask:
                masks.setdefault(mask, []).append((number, sent.src))
        full = (1 << len(self.sources)) - 1
        self.final = tuple(masks.pop(full, ()))
        self.groups = groups_of(masks)
        self.is_disjoint = (
            len(self.sources) > 1 and not self.final and all(g.mask.bit_count() == 1 for g in self.groups)
        )
        if self.is_disjoint:  # every source is a group, with or without recvs
            recvs = {group.mask: group.recvs for group in self.groups}
            self.groups = [Group(1 << bit, recvs.get(1 << bit, ())) for bit in range(len(self.sources))]
        self.arrived = 0
        self.ran = []

    def open(self, sends: Iterable[int]) -> None:
        """Add the subgraphs of these sends to the sources and groups."""
        for send in sends:
            if send in self.sources or send not in self.uses:
                continue
            found = {send}
            while (
                further := {
                    other for other in self.uses if any(set(self.uses[other]) & set(self.uses[one]) for one in found)
                }
                - found
            ):
                found |= further
            first = len(self.sources)
            for bit, source in enumerate(sorted(found), first):
                self.sources[source] = bit
            masks: dict[int, list[tuple[int, int]]] = {}
            for number, src in self.recvs.items():
                mask = sum(1 << self.sources[source] for source in found if number in self.uses[source])
                if mask:
                    masks.setdefault(mask, []).append((number, src))
            if len(found) == 1:
                masks.setdefault(1 << first, [])  # runs all that it reaches
            else:
                self.leafy |= sum(1 << self.sources[source] for source in found & self.leafy_sends)
            self.groups += groups_of(masks)

    def layout(self, sends: Iterable[int] = ()) -> Layout:
        if not self.in_subgraphs:
            return Layout(self.sources, self.groups, self.final)
        self.open(sends)
        sources, groups = self.reported
        self.reported = len(self.sources), len(self.groups)
        return Layout(dict(list(self.sources.items())[sources:]), self.groups[groups:], ())

    def pending(self) -> bool:
        return bool(self.arrived & self.leafy)


def groups_of(masks: dict[int, list[tuple[int, int]]]) -> list[Group]:
    ordered = sorted(masks.items(), key=lambda item: (item[0].bit_count(), item[0]))
    return [Group(mask, tuple(recvs)) for mask, recvs in ordered]


Action = tuple[Any, ...]


class World:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.locals = {w: Local(program, w) for w in range(program.workers)}
        self.parts = {w: PassSchedule(w, program.root, local.layout, local.pending) for w, local in self.locals.items()}
        self.taking_part = program.takes_part()
        self.net: list[tuple[int, int, Any]] = []
        self.dead: int | None = None
        self.cuts = program.cuts
        self.sessions = Sessions(program.workers)
        # Pairs of workers that detect each other's death: those that exchanged a message, in the program or in the
        # pass.
        self.links = {pair for sent in program.sends for pair in ((sent.src, sent.dst), (sent.dst, sent.src))}
        self.dials: list[tuple[int, int, Any]] = []  # messages that wait for a link
        self.reports: list[Any] = []  # those that the root has processed
        self.started = False

    def copy(self) -> "World":
        return copy.deepcopy(self)

    # ---- what can happen ---------------------------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        if not self.started:
            return [("start",)]
        found: list[Action] = [("deliver", *packet) for packet in dict.fromkeys(self.net)]
        found += [("refuse", *pair) for pair in dict.fromkeys(dial[:2] for dial in self.dials)]
        if self.dead is None:
            found += [("kill", w) for w in self.program.mortal]
        found += [("notice", *ends) for ends in self.sessions.unnoticed() if ends in self.links]
        if self.cuts:
            found += [("cut", *pair) for pair in self.sessions.intact_links() if pair in self.links]
        return found

    def do(self, action: Action) -> None:
        getattr(self, action[0])(*action[1:])

    def start(self) -> None:
        self.started = True
        root = self.program.root
        if self.program.subgraphs:
            self.locals[root].open((ROOT,))
        self.locals[root].arrived |= 1 << self.locals[root].sources[ROOT]
        self.carry_out(root, self.parts[root].start())

    def deliver(self, src: int, dst: int, message: Any) -> None:
        self.net.remove((src, dst, message))
        part, local = self.parts[dst], self.locals[dst]
        if part.over is None and isinstance(message, Gradients):
            self.take(dst, message.sends)
        if part.over is None and part.ledger is not None:
            report = message.report if isinstance(message, Gradients) else message
            if type(report).__name__ == "Report":
                self.reports.append(report)
        effects = part.handle(src, message)
        self.carry_out(dst, effects)
        check(part.over or not local.arrived or part._layout, "E1", "an arrival needs the graph")

    def take(self, worker: int, sends: Iterable[int]) -> None:
        local = self.locals[worker]
        if self.program.subgraphs:
            local.open(sends)
        for send in sends:
            check(send in self.taking_part, "E2", f"send {send} got a gradient, and the loss does not use it")
            bit = 1 << local.sources[send]
            check(not local.arrived & bit, "E2", f"send {send} got two gradients")
            local.arrived |= bit

    def kill(self, worker: int) -> None:
        self.dead = worker
        self.sessions.kill(worker)
        del self.parts[worker], self.locals[worker]
        self.net = [packet for packet in self.net if packet[1] != worker]
        self.dials = [dial for dial in self.dials if dial[0] != worker]

    def cut(self, a: int, b: int) -> None:
        self.cuts -= 1
        self.sessions.cut(a, b)

    def refuse(self, worker: int, peer: int) -> None:
        refused = [dial for dial in self.dials if dial[:2] == (worker, peer)]
        self.dials = [dial for dial in self.dials if dial not in refused]
        for _ in refused:
            self.carry_out(worker, self.parts[worker].unreachable(peer, f"{worker} cannot reach {peer}"))

    def send(self, worker: int, peer: int, message: Any) -> None:
        if (worker, peer) not in self.links:
            if (worker, peer) in self.program.walls:
                self.dials.append((worker, peer, message))
                return
            self.links |= {(worker, peer), (peer, worker)}
            waiting = [dial for dial in self.dials if dial[:2] == (peer, worker)]
            self.dials = [dial for dial in self.dials if dial not in waiting]
            self.net += [dial for dial in waiting if self.sessions.session_for(*dial[:2]) is not None]
        if self.sessions.session_for(worker, peer) is not None:
            self.net.append((worker, peer, message))

    def notice(self, worker: int, peer: int) -> None:
        self.sessions.notice(worker, peer)
        self.net = [packet for packet in self.net if packet[:2] != (peer, worker)]
        self.carry_out(worker, self.parts[worker].lost(peer, f"lost {peer}"))

    def carry_out(self, worker: int, effects: Any) -> None:
        todo = list(effects)
        local, part = self.locals[worker], self.parts[worker]
        while todo:
            effect = todo.pop(0)
            if isinstance(effect, Send):
                check(not self.sessions.is_lost(worker, effect.to), "L1", "a message is sent to a lost worker")
                self.send(worker, effect.to, effect.message)
            elif isinstance(effect, Run):
                check(not todo, "E1", "Run is the last effect")
                if (worker, effect.stage) in self.program.failing:
                    todo += part.failed(f"stage {effect.stage} of {worker}")
                    continue
                self.run(worker, local, effect.stage)
                recvs = local.final if effect.stage == FINAL else local.groups[effect.stage].recvs
                self.take(worker, [send for send, peer in recvs if peer == worker])
                todo += part.ran(effect.stage)
            elif isinstance(effect, Finished) and effect.why is None:
                check(worker == self.program.root, "T1", "only the root finishes")
                self.finished()

    def run(self, worker: int, local: Local, stage: int) -> None:
        again = stage == FINAL and self.program.subgraphs  # of further subgraphs
        check(stage not in local.ran or (again and local.pending()), "E1", f"stage {stage} ran twice")
        local.ran.append(stage)
        mask = (1 << len(local.sources)) - 1 if stage == FINAL else local.groups[stage].mask
        check(mask & local.arrived, "E1", f"stage {stage} ran without a gradient")
        waiting = self.expected(local) & mask & ~local.arrived
        check(not waiting, "E1", f"stage {stage} of {worker} did not wait for {waiting:b}")
        if stage == FINAL:
            local.leafy &= ~mask
        elif local.is_disjoint and not self.program.shared:
            local.leafy &= ~mask  # the stage consumes all that is left

    def expected(self, local: Local) -> int:
        """Return the sources that will get a gradient, by bit."""
        return sum(1 << bit for send, bit in local.sources.items() if send == ROOT or send in self.taking_part)

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def finished(self) -> None:
        root = self.program.root
        gone = {w for w in range(self.program.workers) if self.sessions.is_lost(root, w)}  # others: after their part
        check(not gone & self.involved(), "T1", "the pass succeeded although a worker was lost")
        live = [packet for packet in self.net if type(packet[2]).__name__ != "Lost"]
        check(not live, "T1", f"in flight: {live}")
        for worker, local in self.locals.items():
            expected = self.expected(local)
            known = {send for send in local.uses if send == ROOT or send in self.taking_part} <= local.sources.keys()
            check(known, "E2", f"{worker} has not got all gradients")
            check(local.arrived == expected, "E2", f"{worker} got {local.arrived:b} instead of {expected:b}")
            for number, group in enumerate(local.groups):
                reached = bool(group.mask & expected)
                check((number in local.ran) == reached, "T1", f"group {number} of {worker}")
            check(not local.pending(), "T1", f"the last stage of {worker} did not run")
            check(not (local.final and expected) or FINAL in local.ran, "T1", f"the last recvs of {worker}")

    def involved(self) -> set[int]:
        return {self.program.sends[send].src for send in self.taking_part} | {self.program.root}

    def verify(self) -> None:
        root = self.parts.get(self.program.root)
        if root is not None and root.ledger is not None:
            for token, count in root.ledger.outstanding.items():
                check(count in (-1, 1), "T3", f"{token} counts {count}")

    def settled(self) -> None:
        """Check that the pass has ended; no event is left."""
        root = self.parts.get(self.program.root)
        check(root is None or root.over, "T2", "the root waits forever")
        for worker, part in self.parts.items():
            quiet = isinstance(root.over, Finished) and root.over.why is None if root is not None else False
            check(quiet or part.over or not self.locals[worker].arrived, "T2", f"{worker} is not notified of the end")

    def fingerprint(self) -> str:
        fixed = ("_layout", "_make_layout", "_pending", "ledger", "_reached")
        parts = [
            (w, [getattr(part, name) for name in PassSchedule.__slots__ if name not in fixed], ledger_of(part))
            for w, part in self.parts.items()
        ]
        local = [(w, x.arrived, sorted(x.ran), [*x.sources], x.leafy) for w, x in self.locals.items()]
        return repr(
            (
                parts,
                local,
                sorted(map(repr, self.net)),
                sorted(map(repr, self.dials)),
                self.dead,
                self.cuts,
                self.sessions.key(),
                self.started,
                sorted(self.links),
            )
        )


def ledger_of(part: PassSchedule) -> str:
    return repr([getattr(part.ledger, name, None) for name in Ledger.__slots__])


class Counterexample(AssertionError):
    """An invariant broke; `trace` has the actions that led to it."""

    def __init__(self, broken: Exception, trace: list[Action], title: object) -> None:
        super().__init__(f"{broken!r}\n{title}\ntrace = [\n" + "".join(f"    {a!r},\n" for a in trace) + "]")


def explore(program: Program, limit: int = 200_000) -> int:
    """Visit every reachable state; return their number."""
    start = World(program)
    seen = {start.fingerprint()}
    frontier: list[tuple[World, list[Action]]] = [(start, [])]
    while frontier:
        world, trace = frontier.pop()
        actions = world.actions()
        action: Action = ()
        try:
            if all(action[0] in ("kill", "cut") for action in actions):
                world.settled()
            for action in actions:
                after = world.copy()
                after.do(action)
                after.verify()
                mark = after.fingerprint()
                if mark not in seen:
                    seen.add(mark)
                    frontier.append((after, [*trace, action]))
        except (AssertionError, LookupError) as broken:
            raise Counterexample(broken, [*trace, action], program) from broken
        assert len(seen) <= limit, f"more than {limit} states: make the program smaller"
    return len(seen)


def wander(program: Program, seed: int) -> int:
    """Run one random schedule to its end; return its length."""
    rng = random.Random(f"schedule {seed}")
    taste = {
        "deliver": 1.0,
        "kill": 4.0 ** rng.uniform(-4, -1),
        "cut": 4.0 ** rng.uniform(-3, -1),
        "notice": 4.0 ** rng.uniform(-3, 1),
        "refuse": 4.0 ** rng.uniform(-3, 1),
        "start": 1.0,
    }
    world = World(program)
    trace: list[Action] = []
    try:
        while actions := world.actions():
            if all(action[0] in ("kill", "cut") for action in actions):
                world.settled()
                break
            action = rng.choices(actions, [taste[action[0]] for action in actions])[0]
            trace.append(action)
            world.do(action)
            world.verify()
        world.settled()
    except (AssertionError, LookupError) as broken:
        raise Counterexample(broken, trace, f"seed {seed} of {program}") from broken
    return len(trace)


def random_program(seed: int, losses: bool = False, failures: bool = False) -> Program:
    rng = random.Random(f"program {seed}")
    workers = rng.randint(1, 5)
    sends: list[Sent] = []
    here: dict[int, list[int]] = {w: [] for w in range(workers)}  # messages received
    for number in range(rng.randint(0, 14)):
        src, dst = rng.randrange(workers), rng.randrange(workers)
        uses = tuple(x for x in here[src] if rng.random() < rng.choice((0.3, 0.7)))
        sends.append(Sent(src, dst, uses, rng.random() < 0.4))
        here[dst].append(number)
    root = rng.randrange(workers)
    loss = tuple(x for x in here[root] if rng.random() < 0.6)
    failing = tuple((rng.randrange(workers), rng.randint(-1, 2)) for _ in range(rng.randint(0, 3))) if failures else ()
    mortal = tuple(range(workers)) if losses and workers > 1 else ()
    return Program(workers, tuple(sends), root, loss, rng.random() < 0.5, mortal, failing, rng.random() < 0.5)
