"""Worker of the modeled group: a real `RRefTable` and the model's own counts."""

from collections import Counter
from typing import Any

from telegrad.protocols.rref import RRefId, RRefTable, Ticket, TicketKind

Action = tuple[Any, ...]
Handle = tuple[RRefId, int]  # with the table's generation when it was made
SELF = TicketKind.SELF


def duplicate(thing: Any) -> Any:
    """Return a copy of a slotted object, with its containers copied one level deep."""
    cls = type(thing)
    copy = cls.__new__(cls)
    for slot in cls.__slots__ or cls.__mro__[1].__slots__:
        value = getattr(thing, slot)
        setattr(copy, slot, value.copy() if isinstance(value, (list, dict)) else value)
    return copy


class Node:
    """Worker with its table and the model's own count of its handles."""

    __slots__ = ("begun", "creating", "handles", "outgoing", "picture", "script", "step", "table", "values")

    def __init__(self, table: RRefTable, script: tuple[Action, ...]) -> None:
        self.table = table
        self.script = script
        self.step = 0
        self.handles: Counter[Handle] = Counter()  # the program's
        self.values: dict[RRefId, tuple[Handle, ...]] = {}  # existing values of this worker -> the handles inside
        self.creating: dict[RRefId, bool] = {}  # creations in progress at other workers -> timed out
        self.outgoing: tuple[tuple[Ticket, int, int, int], ...] = ()  # held tickets: (ticket, to, session, epoch)
        self.begun: tuple[int, int] | None = None  # receiver and epoch of the message that is being made
        self.picture: Any = None

    def copy(self) -> "Node":
        node = Node.__new__(Node)
        old = self.table
        table = node.table = duplicate(old)
        out = table._out = duplicate(old._out)
        out._batches = {to: duplicate(batch) for to, batch in out._batches.items()}
        for half in ("_owners", "_users"):
            part = duplicate(getattr(old, half))
            part._out = out
            part.entries = {rref: duplicate(entry) for rref, entry in part.entries.items()}
            setattr(table, half, part)
        node.script, node.step, node.picture = self.script, self.step, None
        node.handles, node.values, node.creating = self.handles.copy(), self.values.copy(), self.creating.copy()
        node.outgoing, node.begun = self.outgoing, self.begun
        return node

    def hold(self, rref: RRefId) -> None:
        self.handles[rref, self.table.generation] += 1

    def has(self, rref: RRefId) -> bool:
        return self.held()[rref] > 0

    def held(self) -> Counter[RRefId]:
        """Return the handles that the table must count.

        These are the handles of the program and those inside values, except released ones.
        """
        handles = self.handles.copy()
        for inside in self.values.values():
            handles.update(inside)
        held: Counter[RRefId] = Counter()
        for (rref, generation), count in handles.items():
            if generation == self.table.generation or rref in self.table._owners.entries:
                held[rref] += count
        return held

    def fingerprint(self) -> Any:
        if self.picture is None:
            table = self.table
            out, users = table._out, table._users
            self.picture = (
                self.step,
                tuple(sorted(self.handles.items())),
                tuple(sorted(self.values.items())),
                tuple(sorted(self.creating.items())),
                table.generation,
                self.outgoing,
                self.begun,
                tuple(sorted(
                    (x, e.state, e.handles, tuple(sorted(e.tokens.items()))) for x, e in table._owners.entries.items()
                )),
                tuple(sorted(
                    (x, e.state, e.handles, e.pins, e.tokens, e.creating, e.adding, e.asked, tuple(sorted(e.parents)))
                    for x, e in users.entries.items()
                )),
                tuple(sorted(users.transfers.items())),
                tuple(sorted(
                    (to, tuple(sorted(batch.transfers)), tuple(sorted(batch.releases.items())))
                    for to, batch in out._batches.items()
                )),
                tuple(sorted(out.lost)),
                tuple(sorted(out.epochs.items())),
            )  # fmt: skip
        return self.picture
