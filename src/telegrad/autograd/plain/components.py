"""Components of a plain context: sent messages with shared nodes.

A pass over a message has to wait for the gradients of the messages that share nodes with it, and of no others. Each
worker therefore keeps its sent messages in *components*; messages that share a node are in the same one. The graph of a
message is walked once for this, in the first pass that asks after the message was sent. The walk leaves the component
in the `metadata` of each node, and ends at nodes that have one. It keeps no node alive: the graph is freed with the
record of the message.

Messages stay together when the one that connected them is dropped. A pass may thus wait for more messages than needed;
its gradients are the same. A component that has lost most of its messages is dissolved, and the rest is walked again.

Leaves connect no messages, since every stage adds to `.grad` on its own. A leaf with hooks must get the complete
gradient: `sharing` returns the messages that reach it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from torch import Tensor

from telegrad.autograd.graph.deep_graph import FIRST, GAPS, RecursionGuard, hold_next
from telegrad.autograd.graph.local_graph import LEAF, RECV, kinds

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from telegrad._core import GraphWalk
    from telegrad.autograd.context import Entry, Sent

__all__ = ["Components"]

_FEW = 8  # messages that a component may lose without being dissolved
_MANY = 100  # messages whose walks would set off the cycle collector several times


class _Component:
    """Messages with connected graphs."""

    __slots__ = ("dropped", "is_dissolved", "leaves", "merged_into", "messages")

    def __init__(self) -> None:
        self.messages: set[int] = set()
        self.leaves: set[int] = set()  # ids of tensors, some of which may have been freed
        self.dropped: int = 0  # messages
        self.merged_into: _Component | None = None
        self.is_dissolved: bool = False


class Components:
    """Components of the sent messages of one worker. Thread-safe.

    Attributes:
        walked: Number of walks of records so far.
    """

    def __init__(self) -> None:
        self.walked: int = 0
        self._key = object()  # of the component in the metadata of a node
        self._lock = threading.Lock()
        self._new: dict[int, Sent] = {}  # not walked yet
        self._of: dict[int, tuple[_Component, Sent]] = {}  # message -> its component
        self._by_leaf: dict[int, set[_Component]] = {}  # id of a leaf -> the components that reach it
        self._with_nodes: set[_Component] = set()  # not only leaves
        self._leading_on: set[_Component] = set()  # to received messages
        self._gaps = itertools.cycle(GAPS)
        self._gap = 0  # nodes until the next one that holds those below it

    # ---- messages

    def add(self, record: Sent) -> None:
        """Add a sent message, without walking its graph."""
        self._new[record.id] = record

    def drop(self, records: Iterable[Sent]) -> None:
        """Remove sent messages."""
        with self._lock:
            for record in records:
                if self._new.pop(record.id, None) is None:
                    self._drop(record)

    def clear(self) -> None:
        """Remove all messages."""
        with self._lock:
            dropped = self._new, self._of
            self._new, self._of, self._by_leaf = {}, {}, {}
            self._with_nodes, self._leading_on = set(), set()
        del dropped  # without the lock: frees graphs

    def _drop(self, record: Sent) -> None:
        found = self._of.pop(record.id, None)
        if found is None:
            return
        component = _merged(found[0])
        component.messages.discard(record.id)
        component.dropped += 1
        if not component.messages or component.dropped > len(component.messages) + _FEW:
            self._dissolve(component)

    # ---- questions

    def of(self, message: int) -> list[int]:
        """Return the messages of the component of a message; none if it is not known."""
        with self._lock:
            self._walk_new()
            found = self._of.get(message)
            return [] if found is None else list(_merged(found[0]).messages)

    def met_by(self, walk: GraphWalk) -> set[int]:
        """Return the messages of the components to which the nodes of a walk belong."""
        with self._lock:
            self._walk_new()
            if not self._with_nodes:
                return set()
            found = {self._tag_of(node) for node in walk.nodes if not isinstance(node, Tensor)}
            return {message for component in found if component is not None for message in component.messages}

    def sharing(self, leaves: Iterable[int]) -> set[int]:
        """Return the messages of components that reach one of the leaves with these ids."""
        with self._lock:
            self._walk_new()
            return {
                message
                for leaf in leaves
                for component in self._by_leaf.get(leaf, ())
                for message in component.messages
            }

    def reaches(self, entry: Entry) -> bool:
        """Return whether a message leads to a leaf or to the node of an edge."""
        with self._lock:
            self._walk_new()
            if isinstance(entry, Tensor):
                return id(entry) in self._by_leaf
            return self._tag_of(entry.node) is not None

    @property
    def lead_on(self) -> bool:
        """Whether a message leads to a received one."""
        with self._lock:
            self._walk_new()
            return bool(self._leading_on)

    # ---- the walk; with the lock held

    def _walk_new(self) -> None:
        pause = RecursionGuard() if len(self._new) > _MANY else None  # of the cycle collector
        try:
            while self._new:
                _, record = self._new.popitem()  # the latest first: it may lead to all nodes of earlier ones
                self._walk(record)
        finally:
            if pause is not None:
                pause.close()

    def _walk(self, record: Sent) -> None:
        self.walked += 1
        component = _Component()
        component.messages.add(record.id)
        self._of[record.id] = component, record
        nodes: list[Node] = []
        nexts: list[Node] = []
        for edge in record.edges:
            if isinstance(edge, Tensor):
                self._add_leaf(edge, component)
            elif edge is not None:
                nexts.append(edge.node)
        component = self._visit(nexts, component, nodes)
        count = 0
        guard: RecursionGuard | None = None
        try:
            while nodes:
                node = nodes.pop()
                below = node.next_functions
                count += 1
                if count == FIRST:
                    guard = RecursionGuard()
                self._gap -= 1
                if self._gap <= 0:
                    self._gap = next(self._gaps)
                    hold_next(node, below)
                component = self._visit([there for there, _ in below if there is not None], component, nodes)
        finally:
            if guard is not None:
                guard.close()

    def _add_leaf(self, leaf: Tensor, component: _Component) -> None:
        component.leaves.add(id(leaf))
        self._by_leaf.setdefault(id(leaf), set()).add(component)

    def _visit(self, found: Iterable[Node], component: _Component, nodes: list[Node]) -> _Component:
        """Add nodes to a component, and return the component that it then is part of.

        Appends the nodes to `nodes` below which the walk continues.
        """
        key = self._key
        for node in found:
            kind = kinds[type(node)]
            if kind == LEAF:
                self._add_leaf(node.variable, component)  # type: ignore[attr-defined]
                continue
            metadata = cast("dict[object, _Component]", node.metadata)
            other = metadata.get(key)
            if other is component:
                continue
            if other is not None:
                other = _merged(other)
                if not other.is_dissolved:
                    if other is not component:
                        component = self._merge(other, component)
                    continue
            metadata[key] = component
            if kind == RECV:
                self._leading_on.add(component)
            else:
                nodes.append(node)
            self._with_nodes.add(component)
        return component

    def _tag_of(self, node: Node) -> _Component | None:
        """Return the component of a node, or None."""
        metadata = cast("dict[object, _Component]", node.metadata)
        component = metadata.get(self._key)
        if component is None:
            return None
        component = _merged(component)
        return None if component.is_dissolved else component

    def _merge(self, one: _Component, other: _Component) -> _Component:
        if len(one.messages) + len(one.leaves) < len(other.messages) + len(other.leaves):
            one, other = other, one
        if other in self._leading_on:
            self._leading_on.add(one)
        self._with_nodes.add(one)
        self._unregister(other)
        for leaf in other.leaves:
            self._by_leaf.setdefault(leaf, set()).add(one)
        one.leaves |= other.leaves
        one.messages |= other.messages
        one.dropped += other.dropped
        other.merged_into = one
        other.messages, other.leaves = set(), set()
        return one

    def _dissolve(self, component: _Component) -> None:
        """Forget a component; the messages that are left will be walked again."""
        self._unregister(component)
        component.is_dissolved = True
        for message in component.messages:
            self._new[message] = self._of.pop(message)[1]

    def _unregister(self, component: _Component) -> None:
        for leaf in component.leaves:
            found = self._by_leaf.get(leaf)
            if found is not None:
                found.discard(component)
                if not found:
                    del self._by_leaf[leaf]
        self._with_nodes.discard(component)
        self._leading_on.discard(component)


def _merged(component: _Component) -> _Component:
    """Return the component that this one has become part of."""
    found = component
    while found.merged_into is not None:
        found = found.merged_into
    while component.merged_into is not None:  # later searches are short
        component.merged_into, component = found, component.merged_into
    return found
