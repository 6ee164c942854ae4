"""Which call of torch's engine a node runs in, so that the nodes of what was received hand their gradients to the one
that is meant.

Others may come by the same nodes meanwhile: another thread's call, or one that the program's hooks make. They are told
apart by the id that the engine gives each. It says so only to what runs within a call, which here is the hook of a leaf
that the call is given besides; the engine runs the nodes of leaves first (on the CPU, where all lies that came).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from telegrad.autograd.context import Received

__all__ = ["Call", "take", "taking"]

Gradients: TypeAlias = Sequence[Tensor | None]

_current_call: Any = torch._C._current_graph_task_id
_is_wrapped: Any = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None)
_under_way: dict[int, dict[Any, Gradients | None]] = {}  # id of a call of the engine -> what its recvs have got


class Call:
    """A call of the engine that is about to be made.

    Attributes:
        leaf: to be given to the engine with the others that it begins at.
        gradient: for it.
        found: node of a recv -> its gradients, after the call; None: it got nothing.
    """

    __slots__ = ("_ids", "_slot", "gradient", "leaf")

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._slot: list[dict[Any, Gradients | None]] = [{}]
        with torch.inference_mode(False):
            self.leaf: torch.Tensor = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
            self.gradient: torch.Tensor = self.leaf.detach()
        self.leaf.register_hook(partial(_begin, self._ids, self._slot))  # type: ignore[no-untyped-call]

    @property
    def found(self) -> dict[Any, Gradients | None]:
        return self._slot[0]

    def expect(self, nodes: Sequence[Any]) -> None:
        """It is to come by these nodes."""
        self._slot[0] = dict.fromkeys(nodes)

    @property
    def may_be_made_again(self) -> bool:
        """Is the leaf a plain one, and none that a mode or a transform of the program has made?"""
        leaf = self.leaf
        return type(leaf) is Tensor and leaf.device.type == "cpu" and not (_is_wrapped is None or _is_wrapped(leaf))

    def over(self) -> None:
        """It has been made, or has failed."""
        for number in self._ids:
            _under_way.pop(number, None)
        self._ids.clear()
        self._slot[0] = {}
        self.leaf.grad = None


def _begin(ids: list[int], slot: list[dict[Any, Gradients | None]], _: Tensor) -> None:
    number = _current_call()
    ids.append(number)
    _under_way[number] = slot[0]


_spare: list[Call] = []  # a leaf with a hook takes as long to make as a hundred nodes to run


@contextmanager
def taking(records: Sequence[Received]) -> Iterator[Call]:
    """For one call of the engine in which the nodes of these recvs are to run."""
    nodes: list[Any] = [record.node for record in records]
    for node in nodes:
        node.materialize_grads = False  # what is undefined stays so
    try:
        call = _spare.pop()
    except IndexError:
        call = Call()
    call.expect(nodes)
    try:
        yield call
    finally:
        call.over()
        if call.may_be_made_again:
            _spare.append(call)


def take(node: Any, gradients: Gradients) -> bool:
    """A recv's node runs, with these. False: in a call that is not known, or not to come by it."""
    found = _under_way.get(_current_call())
    if found is None or node not in found:
        return False
    found[node] = gradients
    return True
