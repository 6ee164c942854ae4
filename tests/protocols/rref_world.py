"""Model of a group around real `RRefTable`s: scripts, network and deaths.

A `World` is a state. `actions()` lists the possible next events and `do(action)` executes one. Actions are plain
tuples, so a list of them is a trace that `replay` runs again. The model calls the tables as the docstring of
`protocols/rref.py` requires. It counts handles and values itself, independently of the tables.

The network is a set of packets. Any packet may be delivered next, also between one pair of workers. Packets are lost
only with the session that carries them (sessions.py): with a worker, or with a link between living workers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rref_node import Action, Handle, Node
from sessions import Sessions

from telegrad.protocols.rref import (
    Delete,
    OwnerState,
    RRefId,
    RRefTable,
    Send,
    Ticket,
    TicketKind,
    UnusableRRefError,
)

GRANT, RETURN, FORK, SELF = TicketKind
RUNNING = OwnerState.CREATING
FAULTS = {"kill", "rejoin", "cut", "split"}


class Packet(NamedTuple):
    src: int
    dst: int
    session: int
    kind: str  # "call", "discard", "create", "refuse", "created", "refused", or the name of a protocol message
    body: Any
    tickets: tuple[Ticket, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """Scripts of the workers, and events that may happen at any time.

    Steps: ("own", x); ("create", x, owner, *nested); ("unsent", x, owner) then ("fail", x); ("refuse", x, owner);
    ("share", x, to); ("discard", x, to), which arrives but is not unpacked; ("hold", x, to), which makes a ticket that
    a later ("unhold",) unshares, or ("send",) sends; ("clone", x); ("release_all",); ("begin", to), which reads the
    epoch of the next message to a worker: the core drops it if the epoch ends before it is sent.
    `x` is an RRefId; `nested` are references that are sent in the creation and become part of the value.
    """

    scripts: tuple[tuple[Action, ...], ...]
    drops: str = "end"  # "end": a worker drops its handles at the end of its script; "any": at any time
    flush: str = "eager"  # "free": batches are sent at any time
    timeouts: bool = False  # creations may time out while they are in progress
    kills: int = 0
    mortal: tuple[int, ...] = ()
    rejoin: bool = False
    cuts: int = 0  # links between living workers that break
    splits: int = 0  # partitions
    late: bool = False  # messages may be handled after the end of their session was noticed
    reborn: dict[int, tuple[Action, ...]] = field(default_factory=dict)  # scripts of workers that rejoin
    batch: int = 64
    mutate: Callable[[RRefTable], None] | None = None
    owners: dict[RRefId, int] = field(init=False)
    doomed: frozenset[RRefId] = field(init=False)  # creations that never reach their owner

    def __post_init__(self) -> None:
        owners = {}
        for worker, script in enumerate(self.scripts):
            for step in (*script, *self.reborn.get(worker, ())):
                if step[0] in ("create", "unsent", "refuse"):
                    owners[step[1]] = step[2]
                elif step[0] == "own":
                    owners[step[1]] = worker
        steps = [step for script in (*self.scripts, *self.reborn.values()) for step in script]
        doomed = {step[1] for step in steps if step[0] in ("unsent", "refuse")}
        object.__setattr__(self, "owners", owners)
        object.__setattr__(self, "doomed", frozenset(doomed))


class Broken(AssertionError):
    """An invariant does not hold."""


def check(condition: object, name: str, *facts: object) -> None:
    if not condition:
        raise Broken(f"{name} {facts}")


class World:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        count = len(scenario.scripts)
        self.nodes: list[Node | None] = [Node(self._table(w), scenario.scripts[w]) for w in range(count)]
        self.lives = [0] * count  # current incarnation of each worker
        self.sessions = Sessions(count)
        self.net: list[Packet] = []
        self.late: list[Packet] = []  # received before the end of their session was noticed, and not handled yet
        self.kills, self.cuts, self.splits = scenario.kills, scenario.cuts, scenario.splits
        self.freed: list[RRefId] = []  # values deleted by the last action
        self.shared_nodes: set[int] = set()  # nodes that another World refers to as well

    def _table(self, worker: int) -> RRefTable:
        table = RRefTable(worker, self.scenario.batch)
        if self.scenario.mutate is not None:
            self.scenario.mutate(table)
        return table

    def copy(self) -> "World":
        world = World.__new__(World)
        world.scenario = self.scenario
        world.nodes = self.nodes.copy()
        world.lives = self.lives.copy()
        world.sessions = self.sessions.copy()
        world.net = self.net.copy()
        world.late = self.late.copy()
        world.kills, world.cuts, world.splits = self.kills, self.cuts, self.splits
        world.freed = []
        world.shared_nodes = set(range(len(self.nodes)))
        self.shared_nodes = world.shared_nodes.copy()
        return world

    def fingerprint(self) -> Any:
        return hash((
            tuple(node and node.fingerprint() for node in self.nodes),
            tuple(sorted(map(hash, self.net))),
            tuple(sorted(map(hash, self.late))),
            self.sessions.key(),
            tuple(self.lives),
            (self.kills, self.cuts, self.splits),
        ))  # fmt: skip

    def node(self, worker: int) -> Node:
        """The node, to be changed."""
        node = self.nodes[worker]
        assert node is not None
        if worker in self.shared_nodes:
            self.shared_nodes.discard(worker)
            node = self.nodes[worker] = node.copy()
        node.picture = None
        return node

    def peek(self, worker: int) -> Node | None:
        return self.nodes[worker]

    # ---- what may happen ------------------------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        scenario = self.scenario
        found: list[Action] = [("deliver", packet) for packet in dict.fromkeys(self.net) if self.deliverable(packet)]
        found += [("deliver_late", packet) for packet in dict.fromkeys(self.late)]
        for worker, node in enumerate(self.nodes):
            if node is None:
                if scenario.rejoin:
                    found.append(("rejoin", worker))
                continue
            through = node.step >= len(node.script)
            if not through and self.ready(node, node.script[node.step]):
                found.append(("step", worker))
            if through or scenario.drops == "any":
                found += [("drop", worker, handle) for handle in node.handles]
            if scenario.flush == "free" and node.table.needs_flush:
                found.append(("flush", worker))
            found += [("finish", worker, x) for x, e in node.table._owners.entries.items() if e.state is RUNNING]
            if scenario.timeouts:
                found += [("timeout", worker, rref) for rref, late in node.creating.items() if not late]
            if self.kills and worker in scenario.mortal:
                found.append(("kill", worker))
        found += [("notice", *ends) for ends in self.sessions.unnoticed()]
        found += [("join", *ends) for ends in self.sessions.joinable()]
        found += [("lose_call", me, peer, rref) for me, peer, rref in self.broken_calls()] if scenario.late else []
        if self.cuts:
            found += [("cut", *pair) for pair in self.sessions.intact_links()]
        if self.splits and not self.sessions.away:
            found += [("split", worker) for worker in range(len(self.nodes))]
        if self.sessions.away:
            found.append(("heal",))
        if not found or all(action[0] in FAULTS for action in found):
            # No other event can bring the handle that a step waits for: skip the step.
            found += [("skip", w) for w, n in enumerate(self.nodes) if n is not None and n.step < len(n.script)]
        return found

    @staticmethod
    def ready(node: Node, step: Action) -> bool:
        if step[0] == "create":
            return all(node.has(rref) for rref in step[3:])
        return step[0] not in ("share", "discard", "hold", "clone") or node.has(step[1])

    def deliverable(self, packet: Packet) -> bool:
        return self.sessions.delivers(packet.src, packet.dst, packet.session)

    def broken_calls(self) -> Iterator[tuple[int, int, RRefId]]:
        """Return the creations whose session has ended before their worker has noticed it."""
        for me, peer in self.sessions.unnoticed():
            node = self.nodes[me]
            assert node is not None
            yield from ((me, peer, rref) for rref in node.creating if self.scenario.owners[rref] == peer)

    def has_losses(self) -> bool:
        scenario = self.scenario
        return (self.kills, self.cuts, self.splits) != (scenario.kills, scenario.cuts, scenario.splits)

    def quiet(self) -> bool:
        return not [action for action in self.actions() if action[0] not in FAULTS]

    # ---- what happens ---------------------------------------------------------------------------------------------

    def do(self, action: Action) -> None:
        self.freed.clear()
        getattr(self, "do_" + action[0])(*action[1:])
        if self.scenario.flush == "eager" and action[0] not in ("kill", "cut", "split", "heal"):
            worker = action[1].dst if action[0] in ("deliver", "deliver_late") else action[1]
            node = self.peek(worker)
            if node is not None and node.table.needs_flush:
                self.do_flush(worker)

    def do_deliver(self, packet: Packet) -> None:
        self.net.remove(packet)
        me, sender, kind = packet.dst, packet.src, packet.kind
        node = self.node(me)
        table = node.table
        if kind == "discard":
            for ticket in packet.tickets:
                self.carry_out(me, table.discard(ticket, sender))
            return
        for ticket in packet.tickets:
            if kind != "create":
                node.hold(ticket.rref)
            self.carry_out(me, table.receive(ticket, sender))
        if kind == "create":
            node.values[packet.body] = tuple((ticket.rref, table.generation) for ticket in packet.tickets)
            self.carry_out(me, table.accept_create(packet.body, sender))
            self.post(me, sender, "created", packet.body)
        elif kind == "refuse":
            self.post(me, sender, "refused", packet.body)
        elif kind == "created":
            node.creating.pop(packet.body, None)
            self.carry_out(me, table.created(packet.body))
        elif kind == "refused":
            node.creating.pop(packet.body, None)
            self.carry_out(me, table.create_failed(packet.body, "refused", may_exist=False))
        elif kind != "call":
            self.carry_out(me, table.handle(sender, packet.body))

    def do_deliver_late(self, packet: Packet) -> None:
        """Handle a message of an ended session: only handles and creations count."""
        self.late.remove(packet)
        me = packet.dst
        node = self.node(me)
        for ticket in packet.tickets:
            self.carry_out(me, node.table.receive_late(ticket, "late"))
            if packet.kind == "discard":
                self.carry_out(me, node.table.drop(ticket.rref))
            elif packet.kind == "call":
                node.hold(ticket.rref)
        if packet.kind == "create":
            node.values[packet.body] = tuple((ticket.rref, node.table.generation) for ticket in packet.tickets)
            self.carry_out(me, node.table.accept_create(packet.body, packet.src, late=True))

    def do_step(self, me: int) -> None:
        node = self.node(me)
        verb, *rest = node.script[node.step]
        node.step += 1
        table = node.table
        if verb == "release_all":
            self.carry_out(me, table.release_all())
            return
        if verb == "unhold":
            outgoing, node.outgoing = node.outgoing, ()
            for ticket, to, *_ in outgoing:
                self.unshare(me, (ticket,), to)
            return
        if verb == "send":
            outgoing, node.outgoing = node.outgoing, ()
            for ticket, to, _, epoch in outgoing:
                if epoch == table.epoch_of(to):  # else the core does not send the message
                    self.post(me, to, "call", None, (ticket,))
            return
        if verb == "begin":
            node.begun = rest[0], table.epoch_of(rest[0])
            return
        rref, *rest = rest
        if verb == "own":
            node.values[rref] = ()
            node.hold(rref)
            self.carry_out(me, table.own(rref))
        elif verb in ("create", "unsent", "refuse"):
            owner = rest[0]
            node.hold(rref)
            if owner == me:
                node.values[rref] = ()
                self.carry_out(me, table.begin_create(rref, owner))
                return
            self.carry_out(me, table.begin_create(rref, owner))
            if verb != "unsent":
                node.creating[rref] = False
            tickets = self.tickets(node, rest[1:], owner)
            if verb != "unsent" and not self.post(me, owner, verb, rref, tickets):
                node.creating.pop(rref)
                self.carry_out(me, table.create_failed(rref, "could not be sent", may_exist=False))
        elif verb == "fail":
            self.carry_out(me, table.create_failed(rref, "never left", may_exist=False))
        elif verb == "clone":
            node.hold(rref)
            self.carry_out(me, table.adopt(rref))
        else:
            begun, node.begun = node.begun, None
            epoch = begun[1] if begun is not None and begun[0] == rest[0] else None
            tickets = self.tickets(node, (rref,), rest[0], epoch)
            if epoch is not None and epoch != table.epoch_of(rest[0]):
                return  # the core does not send the message, and nobody takes back its tickets
            if verb == "hold":
                session, epoch = self.sessions.known[me][rest[0]], table.epoch_of(rest[0])
                node.outgoing += tuple((ticket, rest[0], session, epoch) for ticket in tickets)
            elif tickets:
                self.post(me, rest[0], "discard" if verb == "discard" else "call", None, tickets)

    def tickets(
        self, node: Node, rrefs: tuple[RRefId, ...] | list[RRefId], to: int, epoch: int | None = None
    ) -> tuple[Ticket, ...]:
        made = []
        for rref in rrefs:
            try:
                made.append(node.table.share(rref, to, epoch))
            except UnusableRRefError:
                check(node.table.failure_of(rref), "share raises only for what has failed", rref)
        return tuple(made)

    def unshare(self, me: int, tickets: tuple[Ticket, ...], to: int) -> None:
        for ticket in tickets:
            self.carry_out(me, self.node(me).table.unshare(ticket, to))

    def post(self, me: int, to: int, kind: str, body: Any, tickets: tuple[Ticket, ...] = ()) -> bool:
        if self.sessions.is_lost(me, to):  # the transport rejects it
            self.unshare(me, tickets, to)
            return False
        session = self.sessions.session_for(me, to)
        if session is not None:
            self.net.append(Packet(me, to, session, kind, body, tickets))
        return True  # also if the session has ended and this end has not noticed yet

    def carry_out(self, me: int, effects: Any) -> None:
        node = self.node(me)
        for effect in effects:
            if isinstance(effect, Send):
                check(not self.sessions.is_lost(me, effect.to), "G3: nothing is sent to a dead peer", me, effect)
                check(effect.to != me, "nothing is sent to oneself", me, effect)
                self.post(me, effect.to, type(effect.message).__name__, effect.message)
            elif isinstance(effect, Delete):
                if effect.rref in node.values:
                    self.freed.append(effect.rref)
                for inside in node.values.pop(effect.rref, ()):
                    self.carry_out(me, node.table.drop(*inside))

    def do_flush(self, me: int) -> None:
        self.carry_out(me, self.node(me).table.flush())

    def do_finish(self, me: int, rref: RRefId) -> None:
        self.carry_out(me, self.node(me).table.value_ready(rref))

    def do_timeout(self, me: int, rref: RRefId) -> None:
        node = self.node(me)
        node.creating[rref] = True
        self.carry_out(me, node.table.create_failed(rref, "timed out", may_exist=True))

    def do_drop(self, me: int, handle: Handle) -> None:
        node = self.node(me)
        node.handles[handle] -= 1
        if not node.handles[handle]:
            del node.handles[handle]
        self.carry_out(me, node.table.drop(*handle))

    def do_skip(self, me: int) -> None:
        self.node(me).step += 1

    def do_kill(self, worker: int) -> None:
        self.kills -= 1
        self.nodes[worker] = None
        self.sessions.kill(worker)
        self.net = [packet for packet in self.net if packet.dst != worker]
        self.late = [packet for packet in self.late if packet.dst != worker]

    def do_cut(self, a: int, b: int) -> None:
        self.cuts -= 1
        self.sessions.cut(a, b)

    def do_split(self, worker: int) -> None:
        """Separate a worker, or two, from the others."""
        self.splits -= 1
        self.sessions.partition({worker, *range(2, worker)})

    def do_heal(self) -> None:
        self.sessions.heal()

    def do_rejoin(self, worker: int) -> None:
        self.lives[worker] += 1
        # Only the second life has a script: a third would use its ids again.
        script = self.scenario.reborn.get(worker, ()) if self.lives[worker] == 1 else ()
        self.nodes[worker] = Node(self._table(worker), script)
        self.shared_nodes.discard(worker)
        self.sessions.restart(worker)
        table = self.node(worker).table
        for peer in range(len(self.nodes)):
            if self.sessions.is_lost(worker, peer):
                self.carry_out(worker, table.peer_lost(peer, "was dead when I came"))

    def do_lose_call(self, me: int, peer: int, rref: RRefId) -> None:
        node = self.node(me)
        del node.creating[rref]
        self.net = [p for p in self.net if (p.src, p.dst, p.body) != (peer, me, rref) or p.kind[-1] != "d"]
        self.carry_out(me, node.table.create_lost(rref, "connection lost"))

    def do_notice(self, me: int, peer: int) -> None:
        ended = [packet for packet in self.net if (packet.src, packet.dst) == (peer, me) and self.deliverable(packet)]
        self.net = [packet for packet in self.net if packet not in ended]
        if self.scenario.late:
            self.late += [packet for packet in ended if packet.kind in ("call", "discard", "create")]
        self.sessions.notice(me, peer)
        node = self.node(me)
        self.carry_out(me, node.table.peer_lost(peer, "died"))
        for rref in [x for x in node.creating if self.scenario.owners[x] == peer]:
            del node.creating[rref]
            self.carry_out(me, node.table.create_failed(rref, "connection lost", may_exist=True))

    def do_join(self, me: int, peer: int) -> None:
        self.sessions.join(me, peer)
        self.carry_out(me, self.node(me).table.peer_joined(peer))

    # ---- what must hold -------------------------------------------------------------------------------------------

    def talks(self, a: int, b: int) -> bool:
        """Return whether both are in the same session."""
        return self.sessions.talks(a, b)

    def packets(self, src: int, dst: int) -> Iterator[Packet]:
        return (p for p in self.net if p.src == src and p.dst == dst and self.deliverable(p))
