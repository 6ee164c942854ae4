"""The invariants of `src/telegrad/protocols/README.md`, checked by name.

They are checked against a state of the modeled group.
"""

from rref_world import FAULTS, FORK, GRANT, RETURN, World, check

from telegrad.protocols.rref import Accept, Added, Release, RRefId, Ticket, UserState

CREATING, FORKING, CONFIRMED, FAILED, LOST = UserState


def verify(world: World, guarantees_only: bool = False) -> None:
    """Check the invariants of a state, and of the step that led to it."""
    losses = world.has_losses()
    for rref in world.freed:
        outlives(world, rref, world.scenario.owners[rref], losses)
    for worker, node in enumerate(world.nodes):
        if node is not None and not guarantees_only:
            table(world, worker, losses)
    for rref, owner in world.scenario.owners.items():
        promised(world, rref, owner, losses)
        parents(world, rref, owner)
        if not guarantees_only:
            tokens(world, rref, owner)


def table(world: World, worker: int, losses: bool) -> None:
    node = world.nodes[worker]
    assert node is not None
    table, held = node.table, node.held()
    held.update(ticket.rref for ticket in own_tickets(world, worker) if not ticket.transfer)
    stats = table.stats()
    check(losses or not stats.strays, "without losses there are no strays", worker, stats)
    check(stats.handles == held.total(), "handles are counted", worker, stats, held)
    for rref, owned in table._owners.entries.items():
        check(owned.tokens or owned.handles or owned.state == 1, "O1: no owner entry without a reason", worker, rref)
        check(all(n > 0 for n in owned.tokens.values()), "O2: owner's counts are positive", worker, rref, owned.tokens)
        check(owned.handles == held[rref], "handles are counted", worker, rref)
        check((owned.state == 4) == (owned.failure is not None), "O4: LOST has a reason", worker, rref)
    pins: dict[RRefId, int] = {}
    for transfer, (rref, to) in table._users.transfers.items():
        pins[rref] = pins.get(rref, 0) + 1
        if world.talks(worker, to):
            check(
                accepts_pending(world, worker, to, transfer) == 1, "P1: each pin is accepted once", worker, to, transfer
            )
    for rref, used in table._users.entries.items():
        check(used.handles == held[rref], "handles are counted", worker, rref)
        check(used.pins == pins.get(rref, 0), "P2: pins are counted", worker, rref)
        check(used.handles or used.pins or used.creating or used.adding, "U1: no user entry without a reason", rref)
        check(used.tokens >= 0, "U2: counts are never negative", worker, rref)
        check(used.state is not CONFIRMED or used.tokens, "U3: CONFIRMED holds a token", worker, rref)
        check((used.state is CREATING) <= used.creating, "U4: CREATING waits for the owner", worker, rref)
        check((used.state is FORKING) <= used.adding, "U5: FORKING waits for the owner", worker, rref)
        check((used.state in (FAILED, LOST)) == (used.failure is not None), "U6: failures have a reason", worker, rref)
        check(not used.parents or used.state is FORKING, "U7: parents wait for the owner's reply only", worker, rref)


def own_tickets(world: World, worker: int) -> list[Ticket]:
    """Return SELF tickets in flight; those of owned references have a handle already."""
    node = world.nodes[worker]
    assert node is not None
    held = [ticket for ticket, to, *_ in node.outgoing if to == worker]
    return held + [ticket for packet in world.packets(worker, worker) for ticket in packet.tickets]


def tokens(world: World, rref: RRefId, owner: int) -> None:
    """Check T1: for each user, tokens counted = tokens held + tokens in flight."""
    owning = world.nodes[owner]
    if owning is None:
        return
    counted = owning.table._owners.entries.get(rref)
    for user, node in enumerate(world.nodes):
        if node is None or user == owner or not world.talks(user, owner):
            continue
        entry = node.table._users.entries.get(rref)
        has = (entry.tokens if entry else 0) + in_flight(world, user, owner, rref)
        should = counted.tokens.get(user, 0) if counted else 0
        check(has == should, "T1: tokens are conserved", rref, f"user {user} has {has}, owner counts {should}")


def outlives(world: World, rref: RRefId, owner: int, losses: bool) -> None:
    """Check G2: no worker with an unbroken claim referenced the deleted value."""
    for user, node in enumerate(world.nodes):
        if node is None or user == owner or node.held()[rref] <= 0:
            continue
        if node.table.failure_of(rref) is None:
            claim = not losses or protected(world, user, rref, owner, ())
            check(not claim, "G2: no Delete while a worker holds it", rref, f"worker {user}")
    for packet in world.net:
        for ticket in packet.tickets if world.deliverable(packet) else ():
            if ticket.rref == rref and packet.dst != packet.src:
                claim = not losses or carried(world, packet.src, packet.dst, ticket, owner)
                check(not claim, "G2: no Delete under a ticket", packet)


def promised(world: World, rref: RRefId, owner: int, losses: bool) -> None:
    """Check G2 for the program: without losses its references are never LOST."""
    node = world.nodes[owner]
    if node is not None and not losses and rref not in world.scenario.doomed:
        check(node.table.failure_of(rref) is None, "G2: a living reference is never LOST", rref)


def parents(world: World, rref: RRefId, owner: int) -> None:
    """Check G2: a parent's entry outlives the owner's confirmation of its child."""
    if world.lives[owner] and ("own", rref) not in world.scenario.reborn.get(owner, ()):
        return  # workers that know of the owner's death have ended the entry, others will
    children = [(p.src, p.dst, t.kind) for p in world.net for t in p.tickets if t.rref == rref and world.deliverable(p)]
    for worker, node in enumerate(world.nodes):
        entry = node.table._users.entries.get(rref) if node is not None else None
        children += [(parent, worker, FORK) for parent, _ in entry.parents] if entry is not None else []
    for parent, child, kind in children:
        parts = [(parent, child), (parent, owner), (child, owner)]
        if (world.scenario.cuts or world.scenario.splits) and any(world.sessions.current[a][b] for a, b in parts):
            continue  # the entry has ended with an earlier session
        if kind != GRANT and parent != owner and all(world.talks(a, b) for a, b in parts):
            node = world.nodes[parent]
            here = node is not None and rref in node.table._users.entries
            check(here, "G2: a parent outlives its child's confirmation", rref, parent, child)


def protected(world: World, user: int, rref: RRefId, owner: int, seen: tuple[int, ...]) -> bool:
    """Return whether an unbroken chain leads from the entry to a counted token."""
    node = world.nodes[user]
    if node is None or user in seen or not world.talks(user, owner):
        return False
    entry = node.table._users.entries.get(rref)
    if entry is None or entry.state is LOST:
        return False
    if entry.state is not FORKING:
        return entry.creating or entry.tokens > 0  # FAILED by a timeout keeps its token while it has pins
    return any(pinned(world, parent, user, rref, transfer, owner, (*seen, user)) for parent, transfer in entry.parents)


def pinned(world: World, parent: int, to: int, rref: RRefId, transfer: int, owner: int, seen: tuple[int, ...]) -> bool:
    node = world.nodes[parent]
    if node is None or not world.talks(parent, to):
        return False
    return node.table._users.transfers.get(transfer) == (rref, to) and protected(world, parent, rref, owner, seen)


def carried(world: World, src: int, dst: int, ticket: Ticket, owner: int) -> bool:
    rref, _, kind, transfer = ticket
    if kind == GRANT:
        return world.talks(src, dst)
    return kind in (FORK, RETURN) and pinned(world, src, dst, rref, transfer, owner, ())


IDLE = {"drop", "timeout", *FAULTS}


def rested(world: World, verbs: set[str]) -> None:
    """Check L1: when only drops are left to happen, no worker waits for anything."""
    if not verbs <= IDLE or any(node is not None and node.step < len(node.script) for node in world.nodes):
        return
    for worker, node in enumerate(world.nodes):
        if node is not None:
            stats = node.table.stats()
            waiting = stats.expected + stats.pending_users + stats.pins + stats.queued
            check(not waiting, "L1: no worker waits forever", worker, stats)


def settled(world: World) -> None:
    """Check G1: once every handle is dropped and no event is left, no entry is left."""
    for worker, node in enumerate(world.nodes):
        if node is None:
            continue
        stats = node.table.stats()
        check(not any(stats[:-1]), "G1: nothing is left", worker, stats)
        check(not node.table.leaks(), "G1: nothing is left", worker)
        check(not node.values and not node.creating, "G1: no value is left", worker, node.values, node.creating)


def in_flight(world: World, user: int, owner: int, rref: RRefId) -> int:
    """Return the number of tokens of `user` in flight to or from the owner."""
    tokens = 0
    for packet in world.packets(owner, user):
        tokens += sum(t.rref == rref and t.kind == GRANT for t in packet.tickets)
        tokens += packet.kind == "created" and packet.body == rref
        tokens += isinstance(packet.body, Added) and packet.body.rref == rref
    for packet in world.packets(user, owner):
        if isinstance(packet.body, Release):
            tokens += sum(n for x, n in packet.body.items if x == rref)
    user_node, owner_node = world.nodes[user], world.nodes[owner]
    assert user_node is not None
    assert owner_node is not None
    for ticket, to, life, _ in owner_node.outgoing:
        tokens += (ticket.rref, ticket.kind, to, life) == (rref, GRANT, user, world.sessions.current[owner][user])
    batch = user_node.table._out._batches.get(owner)
    return tokens + (batch.releases.get(rref, 0) if batch else 0)


def accepts_pending(world: World, sender: int, receiver: int, transfer: int) -> int:
    """Return the number of places that have a transfer; must be one."""
    places = sum(t.transfer == transfer and t.kind != GRANT for p in world.packets(sender, receiver) for t in p.tickets)
    node, sending = world.nodes[receiver], world.nodes[sender]
    assert node is not None
    assert sending is not None
    places += sum(t.transfer == transfer and t.kind != GRANT and to == receiver for t, to, *_ in sending.outgoing)
    places += sum((sender, transfer) in entry.parents for entry in node.table._users.entries.values())
    batch = node.table._out._batches.get(sender)
    places += batch.transfers.count(transfer) if batch else 0
    for packet in world.packets(receiver, sender):
        places += packet.body.transfers.count(transfer) if isinstance(packet.body, Accept) else 0
    return places
