"""Autograd contexts on links that break, and with workers that restart.

Invariants: a context ends on every worker once its root has left it or is lost, also if a request begins it again; its
root never begins it again.
"""

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from schedules import run_schedules
from sessions import Sessions

from telegrad.autograd.contexts import ID_BITS, Contexts
from telegrad.errors import WorkerLost

Packet = tuple[int, int, int, tuple[Any, ...]]  # from, to, session, message
Unsent = tuple[int, int, int, tuple[Any, ...]]  # from, to, epoch, message


class World:
    """Workers whose requests and notifications travel in sessions.

    The id of a connection is the number of its session. A thread may be interrupted between any two steps: it reads the
    epoch of a request, counts it, and sends it; it ends a context and notifies the peers; it receives and handles.
    Messages to a lost peer wait for the next session, or fail if the peer is thought to be gone.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"contexts {seed}")
        self.size = self.rng.randint(2, 4)
        self.sessions = Sessions(self.size)
        self.lives = [0] * self.size
        self.nodes: dict[int, Contexts] = {}
        self.ended: list[set[int]] = [set() for _ in range(self.size)]
        self.net: list[Packet] = []
        self.late: list[Packet] = []  # messages that a thread handles after the end of their session
        self.epochs = [[0] * self.size for _ in range(self.size)]  # of the messages that a worker makes now for a peer
        self.gone: set[tuple[int, int]] = set()  # worker, peer: messages fail until the peer returns
        self.begun: list[tuple[int, Any, int, int]] = []  # requests to count: worker, context, peer, epoch
        self.unsent: list[Unsent] = []
        self.steps = self.rng.randint(5, 40)
        self.faults = self.rng.choice((0, 1, 2, 4))
        self.faulty = False
        for worker in range(self.size):
            self.start(worker)

    def start(self, worker: int) -> None:
        def send(peer: int, message: tuple[int, int], epoch: int) -> None:
            self.unsent.append((worker, peer, epoch, ("ended", *message)))

        def on_end(context: Any, why: str) -> None:
            if context.id >> ID_BITS == worker:
                assert context.id not in self.ended[worker], "a context ends once on its root"
                self.ended[worker].add(context.id)

        self.ended[worker] = set()
        self.epochs[worker] = [0] * self.size
        first = self.lives[worker] * 1000
        self.nodes[worker] = Contexts(worker, first, send, on_end, lambda ends: self.is_open(worker, ends))

    def is_open(self, worker: int, connection: int) -> bool:
        peer, session = divmod(connection, 1000)
        return self.sessions.known[worker][peer] == session

    def send(self, unsent: Unsent) -> None:
        self.unsent.remove(unsent)
        src, dst, epoch, message = unsent
        if epoch == self.epochs[src][dst] and (src, dst) not in self.gone:  # else the core drops it
            self.post(src, dst, message)

    def post(self, src: int, dst: int, message: tuple[Any, ...]) -> None:
        known = self.sessions.known[src][dst]
        session = self.sessions.current[src][dst] if known < 0 else known
        if dst in self.nodes and session == self.sessions.current[src][dst]:
            self.net.append((src, dst, session, message))

    def choices(self) -> list[tuple[Callable[..., None], Any]]:
        found: list[tuple[Callable[..., None], Any]] = []
        found += [(self.deliver, packet) for packet in self.net if self.sessions.delivers(*packet[:3])]
        found += [(self.handle, packet) for packet in self.late]
        found += [(self.count, begun) for begun in self.begun]
        found += [(self.send, unsent) for unsent in self.unsent]
        found += [(self.notice, ends) for ends in self.sessions.unnoticed()]
        found += [(self.join, ends) for ends in self.sessions.joinable()]
        if self.sessions.away:
            found.append((self.heal, None))
        if self.steps:
            found += [(self.open, worker) for worker in self.nodes]
            if self.faults:
                found.append((self.fail, None))
        for worker, node in self.nodes.items():
            for number, context in node.table.items():
                if self.steps:
                    found.append((self.call, (worker, context)))
                if number >> ID_BITS == worker:
                    found.append((self.leave, (worker, context)))
        found += [(self.restart, worker) for worker in range(self.size) if worker not in self.nodes]
        return found

    def open(self, worker: int) -> None:
        self.steps -= 1
        self.nodes[worker].open()

    def call(self, what: tuple[int, Any]) -> None:
        self.steps -= 1
        worker, context = what
        peer = self.rng.choice([w for w in range(self.size) if w != worker])
        if not self.sessions.is_lost(worker, peer) or (worker, peer) in self.gone:
            self.begun.append((worker, context, peer, self.epochs[worker][peer]))

    def count(self, begun: tuple[int, Any, int, int]) -> None:
        self.begun.remove(begun)
        worker, context, peer, epoch = begun
        try:
            number = self.nodes[worker].on_send(context, peer, (), True, epoch)
        except WorkerLost:
            return
        if number is None:
            assert self.has_been_left(context.id), "a request is sent without a context whose root lives in it"
            return
        if self.rng.random() < 0.1:
            self.nodes[worker].rollback(context, 0, peer, epoch)
        else:
            self.unsent.append((worker, peer, epoch, ("request", context.id)))

    def has_been_left(self, context: int) -> bool:
        """Return whether no later pass needs what is recorded in a context."""
        root = self.nodes.get(context >> ID_BITS)
        return root is None or root.find(context) is None

    def leave(self, what: tuple[int, Any]) -> None:
        self.nodes[what[0]].end(what[1])

    def deliver(self, packet: Packet) -> None:
        self.net.remove(packet)
        self.handle(packet)

    def handle(self, packet: Packet) -> None:
        if packet in self.late:
            self.late.remove(packet)
        src, dst, session, (kind, number, *counts) = packet
        node = self.nodes[dst]
        if kind == "ended":
            requests, *lost = counts[0] if isinstance(counts[0], tuple) else counts
            node.on_ended(src, number, requests, src * 1000 + session, *lost)
            return
        context = node.on_request(number, src, src * 1000 + session)
        if context is None and self.is_open(dst, src * 1000 + session):
            assert self.has_been_left(number), "a request runs without a context whose root lives in it"
        assert context is None or number not in self.ended[dst], "a context begins again on its root"

    def notice(self, ends: tuple[int, int]) -> None:
        me, peer = ends
        over = [packet for packet in self.net if packet[:2] == (peer, me) and self.sessions.delivers(*packet[:3])]
        self.net = [packet for packet in self.net if packet not in over]
        self.late += [packet for packet in over if self.rng.random() < 0.5]
        self.sessions.notice(me, peer)
        self.epochs[me][peer] += 1
        self.nodes[me].peer_lost(peer, self.epochs[me][peer])
        if self.rng.random() < 0.3:
            self.gone.add(ends)

    def join(self, ends: tuple[int, int]) -> None:
        self.sessions.join(*ends)
        if ends in self.gone:
            me, peer = ends
            self.gone.discard(ends)
            self.epochs[me][peer] += 1
            self.nodes[me].peer_joined(peer, self.epochs[me][peer])

    def heal(self, _: None) -> None:
        self.sessions.heal()

    def restart(self, worker: int) -> None:
        self.lives[worker] += 1
        self.sessions.restart(worker)
        self.start(worker)

    def fail(self, _: None) -> None:
        self.faults -= 1
        self.faulty = True
        kind, worker = self.rng.choice(("cut", "cut", "kill", "split")), self.rng.randrange(self.size)
        links = self.sessions.intact_links()
        if kind == "cut" and links:
            self.sessions.cut(*self.rng.choice(links))
        elif kind == "split" and not self.sessions.away:
            self.sessions.partition({worker})
        elif kind == "kill" and worker in self.nodes:
            self.sessions.kill(worker)
            del self.nodes[worker]
            self.net = [packet for packet in self.net if packet[1] != worker]
            self.late = [packet for packet in self.late if packet[1] != worker]
            self.gone = {ends for ends in self.gone if ends[0] != worker}
            self.begun = [begun for begun in self.begun if begun[0] != worker]
            self.unsent = [unsent for unsent in self.unsent if unsent[0] != worker]


def run_contexts(seed: int) -> None:
    world = World(seed)
    hurry = {
        name: 4.0 ** world.rng.uniform(-2, 2)
        for name in ("deliver", "handle", "notice", "join", "call", "count", "send")
    }
    hurry |= {name: 4.0 ** world.rng.uniform(-3, 0) for name in ("open", "leave")}  # contexts live long
    while found := world.choices():
        act, what = world.rng.choices(found, [hurry.get(act.__name__, 0.5) for act, _ in found])[0]
        act(what)
    for worker, node in world.nodes.items():
        assert not node.table, f"contexts never end on worker {worker}: {node.table}"
        assert not node.tombstones, f"worker {worker} keeps {node.tombstones}"
        assert not node.broken, f"worker {worker} keeps {node.broken}"


def test_contexts_end() -> None:
    assert run_schedules(run_contexts, range(300)) == 300


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_contexts_end_in_many_schedules() -> None:
    assert run_schedules(run_contexts, range(1000, 21000)) == 20_000


def test_a_context_ends_after_its_root_has_lost_the_sessions_of_a_cycle() -> None:
    """Workers 1 and 2 have got requests from each other only, after the cuts."""
    notices: list[tuple[int, int, tuple[int, int]]] = []
    cuts: dict[frozenset[int], int] = defaultdict(int)

    def start(me: int) -> Contexts:
        return Contexts(
            me, 0, lambda peer, word, epoch: notices.append((me, peer, word)), lambda *_: None, lambda connection: True
        )

    workers = [start(me) for me in range(4)]
    root = workers[0].open()

    def call(src: int, dst: int) -> None:
        context = workers[src].find(root.id)
        assert context is not None
        workers[src].on_send(context, dst, (), True, cuts[frozenset((src, dst))])
        workers[dst].on_request(root.id, src, 0)

    def cut(src: int, dst: int) -> None:
        ends = frozenset((src, dst))
        notices[:] = [packet for packet in notices if frozenset(packet[:2]) != ends]
        cuts[ends] += 1
        workers[src].peer_lost(dst, cuts[ends])
        workers[dst].peer_lost(src, cuts[ends])

    for src, dst in ((0, 1), (0, 3), (3, 2)):
        call(src, dst)
    cut(0, 1)
    call(2, 1)  # the context begins again there
    call(1, 2)
    cut(0, 3)
    cut(2, 3)  # with the notification of worker 3
    assert [list(worker.table) for worker in workers] == [[root.id], [root.id], [root.id], []]
    workers[0].end(root)
    while notices:
        src, dst, (number, count) = notices.pop()
        workers[dst].on_ended(src, number, count, 0)
    assert not any(worker.table or worker.tombstones for worker in workers)


def lone_worker(worker: int) -> Contexts:
    return Contexts(worker, 0, lambda peer, message, epoch: None, lambda context, why: None, lambda connection: True)


def test_a_context_that_only_a_lost_worker_used_ends() -> None:
    contexts = lone_worker(2)
    shared, orphan = 1, 2  # of worker 0
    for number, peer in ((shared, 1), (shared, 3), (orphan, 1)):
        contexts.on_request(number, peer, connection=0)
    contexts.peer_lost(1, 1)
    assert set(contexts.table) == {shared}


def test_tensors_sent_to_a_lost_worker_are_freed() -> None:
    contexts = lone_worker(0)
    context = contexts.open()
    lost, kept = (
        contexts.on_send(context, peer, [torch.ones(1, requires_grad=True) * 2], request=True) for peer in (1, 2)
    )
    assert {lost, kept} == set(context.sends)
    contexts.peer_lost(1, 1)
    assert set(context.sends) == {kept}


def test_requests_of_an_ended_session_are_not_announced_in_the_next() -> None:
    announced: list[int] = []
    contexts = Contexts(
        2, 0, lambda peer, message, epoch: announced.append(peer), lambda context, why: None, lambda ends: True
    )
    context = contexts.on_request(1, 0, connection=0)  # of worker 0
    assert context is not None
    for peer in (0, 1):
        contexts.on_send(context, peer, (), request=True)
    contexts.peer_lost(0, 1)
    assert announced == [1]


def test_the_counts_of_an_ended_session_do_not_reach_the_next() -> None:
    announced: list[tuple[int, tuple[int, int], int]] = []
    me = Contexts(0, 0, lambda *what: announced.append(what), lambda context, why: None, lambda ends: True)
    context = me.open()
    for epoch in (0, 1, 0):  # the last is made before the end of the session, and counted after it
        me.on_send(context, 1, (), True, epoch)
        if not epoch:
            me.peer_lost(1, 1)
    me.rollback(context, 0, 1, 0)
    me.rollback(context, 0, 1, None)  # of a reply
    me.end(context)
    assert announced == [(1, (context.id, 1), 1)]


def test_a_peer_is_notified_in_the_present_epoch() -> None:
    """Another worker may have begun the context there again."""
    announced: list[tuple[int, tuple[int, int], int]] = []
    me = Contexts(0, 0, lambda *what: announced.append(what), lambda context, why: None, lambda ends: True)
    lost, returned = me.open(), me.open()
    for context in (lost, returned):
        me.on_send(context, 1, (), True, 0)
    me.peer_lost(1, 1)
    me.end(lost)
    me.peer_joined(1, 2)
    me.end(returned)
    assert announced == [(1, (lost.id, 0), 1), (1, (returned.id, 0), 2)]


def test_a_late_notification_leaves_no_tombstone() -> None:
    ended: set[int] = set()
    me = Contexts(1, 0, lambda *what: None, lambda context, why: None, lambda connection: connection not in ended)
    ended.add(7)
    me.peer_lost(0, 1)
    me.on_ended(0, 3, 2, 7)
    assert not me.tombstones
