"""The core's walk of torch's graph."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad._core import GraphWalk
from telegrad.autograd.graph.deep_graph import FIRST, RecursionGuard
from telegrad.autograd.graph.local_graph import INNER, LEAF, RECV, kinds


def node_of(x: Tensor) -> Any:
    node = torch.autograd.graph.get_gradient_edge(x).node
    assert kinds[type(node)] == (LEAF if x.is_leaf else INNER)
    return node


@pytest.fixture
def x() -> Tensor:
    return torch.rand(3, requires_grad=True)


def same(found: Any, expected: Any) -> bool:
    """Compare by identity: tensors have no truth."""
    if type(found) in (tuple, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found is expected or (type(found) is int and found == expected)


def test_leaves_are_listed_once_per_source(x: Tensor) -> None:
    y = torch.rand(3, requires_grad=True)
    first, second, third = [node_of(z) for z in ((x * 2) * (y + x), x - 1, y * x)]
    walk = GraphWalk(kinds)
    leaves, recvs, shared = walk.walk([(first, 0), None])
    assert {id(leaf) for leaf in leaves} == {id(x), id(y)}
    assert len(leaves) == 2
    assert recvs == shared == []
    assert same(walk.walk([(second, 0)]), ([x], [], [(x, 0)]))
    _, _, shared = walk.walk([(third, 0), x])
    assert {(id(leaf), before) for leaf, before in shared} == {(id(x), 1), (id(y), 0)}
    assert not walk.sources_meet
    assert same(walk.walk([y, y]), ([y], [], [(y, 2)]))


class Node:
    """Node with the attributes that a walk reads."""

    def __init__(self, *nexts: Any) -> None:
        self.next_functions = tuple([(there, 0) for there in nexts])


class PassResult(Node):
    """Node at which a walk ends."""


KINDS = {Node: INNER, PassResult: RECV}


def test_shared_nodes_keep_all_nodes_and_edges() -> None:
    end, other = PassResult(), PassResult()
    common = Node(end)
    first, second = Node(None, common), Node(Node(other), common, other)
    walk = GraphWalk(KINDS)
    assert walk.walk([(first, 0)]) == ([], [end], [])
    assert not walk.sources_meet
    assert walk.walk([None, (second, 0)]) == ([], [other], [])
    assert walk.sources_meet
    nodes = walk.nodes
    assert [[nodes[n] if n >= 0 else None for n in walk.starts(at)] for at in range(2)] == [[first], [None, second]]
    for number, node in enumerate(nodes):
        assert walk.kinds[number] == KINDS[type(node)]
        if type(node) is Node:
            assert [(nodes[n] if n >= 0 else None, 0) for n in walk.below(number)] == list(node.next_functions)
    order = [nodes[number] for number in walk.order()]
    assert set(order) == {node for node in nodes if type(node) is Node}
    assert len(order) == 4
    for place, node in enumerate(order):
        assert not {below for below, _ in node.next_functions} & set(order[:place])


def test_a_recv_reached_from_two_sources_is_shared() -> None:
    end = PassResult()
    walk = GraphWalk(KINDS)
    assert walk.walk([(Node(end), 0)]) == ([], [end], [])
    assert walk.walk([(end, 0)]) == ([], [], [])
    assert walk.sources_meet


def test_many_alternating_types() -> None:
    """There are more types than the walk caches."""
    types = [type(f"Node{number}", (Node,), {}) for number in range(200)]
    end: Any = PassResult()
    start = end
    for _ in range(20):
        for one in types:
            start = one(start)
    walk = GraphWalk({**dict.fromkeys(types, INNER), PassResult: RECV})
    assert walk.walk([(start, 0)]) == ([], [end], [])
    assert len(walk.order()) == 4000


def test_next_functions_of_any_kind(x: Tensor) -> None:
    class Odd:
        next_functions: Any = 7

    class OfTheClass:
        next_functions = ((node_of(x), 0),)

    for wrong in (7, [], None):
        Odd.next_functions = wrong
        with pytest.raises(TypeError, match="next_functions"):
            GraphWalk({Odd: INNER}).walk([(Odd(), 0)])

    class Later:
        def __init__(self, there: Any) -> None:
            if there is not None:
                self.next_functions = ((there, 0),)

    last = Later(None)
    first = last
    for _ in range(20):
        first = Later(first)
    with pytest.raises(AttributeError, match="next_functions"):
        GraphWalk({Later: INNER}).walk([(first, 0)])
    last.next_functions = ()
    assert GraphWalk({Later: INNER}).walk([(first, 0)]) == ([], [], [])
    assert same(GraphWalk({**kinds, OfTheClass: INNER}).walk([(OfTheClass(), 0)]), ([x], [], []))


def test_some_nodes_of_a_large_graph_keep_their_successors(x: Tensor) -> None:
    """About every 64th does: otherwise freeing them would overflow the stack."""
    y = x
    for _ in range(100_000):
        y = y * 1.0
    walk = GraphWalk(kinds, RecursionGuard)
    assert same(walk.walk([(node_of(y), 0)]), ([x], [], []))
    assert not gc.isenabled()
    guard: Any = walk.guard
    for _ in range(2):  # the walk may continue
        guard.close()
        assert gc.isenabled()
        guard.resume()
        assert not gc.isenabled()
    guard.close()
    held, node = [], node_of(y)
    for _ in range(100_000):
        held.append("telegrad" in node.metadata)
        node = node.next_functions[0][0]
    assert not any(held[: FIRST - 1])
    gaps, last = [], 0
    for at, is_held in enumerate(held):
        if is_held:
            gaps.append(at - last)
            last = at
    assert max(gaps[1:]) < 128
    del node, y, walk


def test_a_small_graph_needs_no_guard(x: Tensor) -> None:
    walk = GraphWalk(kinds, RecursionGuard)
    walk.walk([(node_of(x * 2), 0)])
    assert walk.guard is None


def test_nodes_are_released_with_the_walk(x: Tensor) -> None:
    walk = GraphWalk(kinds)
    y = x * 2
    gone: list[int] = []

    class ReportsDeletion:
        def __del__(self) -> None:
            gone.append(1)

    node_of(y).metadata["tell"] = ReportsDeletion()
    walk.walk([(node_of(y), 0)])
    del y
    assert not gone
    del walk
    assert gone


def test_values_that_are_no_graph_raise() -> None:
    with pytest.raises(AttributeError, match="next_functions"):
        GraphWalk({int: INNER}).walk([(7, 0)])
    with pytest.raises(AttributeError, match="variable"):
        GraphWalk({int: LEAF}).walk([(7, 0)])
    with pytest.raises(IndexError):
        GraphWalk(kinds).walk([()])
    with pytest.raises(KeyError):
        GraphWalk({}).walk([(7, 0)])
