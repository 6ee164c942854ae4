"""The core's walk of torch's graph."""

from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad._core import Reach
from telegrad.autograd.deep import FIRST, Descent
from telegrad.autograd.graph import INNER, LEAF, OWN, RECV, kinds


def node_of(x: Tensor) -> Any:
    node = torch.autograd.graph.get_gradient_edge(x).node
    assert kinds[type(node)] == (LEAF if x.is_leaf else INNER)
    return node


@pytest.fixture
def x() -> Tensor:
    return torch.rand(3, requires_grad=True)


def test_ends_come_once_for_each_source_with_who_came_before(x: Tensor) -> None:
    y = torch.rand(3, requires_grad=True)
    first, second, third = [node_of(z) for z in ((x * 2) * (x + y), x - 1, y * x)]
    reach = Reach(kinds)
    found = reach.walk([first], 5)
    assert found is not None
    assert len(found) == 2
    assert set(found) == {(node_of(x), None), (node_of(y), None)}
    assert reach.walk([first], 5) == []
    assert reach.walk([second], -1) == [(node_of(x), 5)]
    assert set(reach.walk([third, node_of(x)], 7) or []) == {(node_of(x), -1), (node_of(y), 5)}


def test_sources_that_meet(x: Tensor) -> None:
    middle = x * 2
    reach = Reach(kinds)
    assert reach.walk([node_of(middle + 1)], 0) is not None
    assert reach.walk([node_of(middle - 1)], 1) is None


class Node:
    """As much of a node as a walk looks at."""

    def __init__(self, *nexts: Any) -> None:
        self.next_functions = tuple([(there, 0) for there in nexts])


class Own(Node):
    """One of the program."""


class End(Node):
    """Where a walk ends."""


def test_which_nodes_run_no_code_of_the_program_and_lead_on() -> None:
    end = End()
    reach = Reach({Node: INNER, Own: OWN, End: RECV})
    assert reach.walk([Node(Node(end), None)], 0) == [(end, None)]
    assert (reach.inner, reach.plain) == (2, 2)
    assert reach.walk([Own(end)], 1) is None  # another source leads there
    for plain, node in [(1, Node(Own(end))), (1, Node(end, Node())), (1, Node(end, Node(None)))]:
        reach = Reach({Node: INNER, Own: OWN, End: RECV})
        assert reach.walk([node], 0) == [(end, None)]
        assert (reach.inner, reach.plain) == (2, plain)


def test_which_nodes_are_the_programs(x: Tensor) -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, grad: Tensor) -> Tensor:
            return grad

    assert kinds[type(Same.apply(x).grad_fn)] == OWN
    assert kinds[type((x * 2).grad_fn)] == INNER


def test_many_types_that_take_turns() -> None:
    """More than the walk knows at a time."""
    types = [type(f"Node{number}", (Node,), {}) for number in range(200)]
    end: Any = End()
    start = end
    for _ in range(20):
        for one in types:
            start = one(start)
    reach = Reach({**dict.fromkeys(types[::2], INNER), **dict.fromkeys(types[1::2], OWN), End: RECV})
    assert reach.walk([start], 0) == [(end, None)]
    assert (reach.inner, reach.plain) == (4000, 2000)


def test_next_functions_of_any_kind(x: Tensor) -> None:
    class Odd:
        next_functions: Any = 7

    class OfTheClass:
        next_functions = ((node_of(x), 0),)

    for wrong in (7, [], None):
        Odd.next_functions = wrong
        with pytest.raises(TypeError, match="next_functions"):
            Reach({Odd: INNER}).walk([Odd()], 0)

    class Later:
        def __init__(self, there: Any) -> None:
            if there is not None:
                self.next_functions = ((there, 0),)

    last = Later(None)
    first = last
    for _ in range(20):
        first = Later(first)
    with pytest.raises(AttributeError, match="next_functions"):
        Reach({Later: INNER}).walk([first], 0)
    last.next_functions = ()
    assert Reach({Later: INNER}).walk([first], 0) == []
    found = Reach({**kinds, OfTheClass: INNER}).walk([OfTheClass()], 0)
    assert found == [(node_of(x), None)]


def test_a_large_graph_is_made_to_be_freed_step_by_step(x: Tensor) -> None:
    """Of its nodes every 64th or so holds what it leads to: else the stack would overflow when they die."""
    y = x
    for _ in range(100_000):
        y = y * 1.0
    with Descent() as descent:
        assert Reach(kinds).walk([node_of(y)], 0, descent) == [(node_of(x), None)]
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
    del node, y


def test_nodes_are_let_go_of(x: Tensor) -> None:
    reach = Reach(kinds)
    y = x * 2
    gone: list[int] = []

    class Tell:
        def __del__(self) -> None:
            gone.append(1)

    node_of(y).metadata["tell"] = Tell()
    reach.walk([node_of(y)], 0)
    del y
    assert not gone
    del reach
    assert gone


def test_what_is_no_graph() -> None:
    with pytest.raises(AttributeError, match="next_functions"):
        Reach({int: INNER}).walk([7], 0)
    with pytest.raises(KeyError):
        Reach({}).walk([7], 0)
