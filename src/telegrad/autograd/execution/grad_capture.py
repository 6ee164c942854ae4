"""Passes the gradients of recv nodes to the engine call that runs these nodes.

Only a stage with parameters under DistributedDataParallel runs recv nodes (see `ddp.py`). Another call may reach the
same node at the same time: a call of another thread, or one that a hook of the program makes. The engine gives each
call an id, which is visible only to code inside the call. That code is the hook of a leaf, the first root of the call.

The engine runs the node of this leaf before all others of its queue. The thread of the call has one queue for CPU and
`meta` tensors. Each other device has a queue and a thread of its own, so a recv of tensors of such a device could run
before the hook: it would need a leaf there. Received tensors are on the CPU.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Self, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

__all__ = ["Captured", "EngineCall", "deliver"]

Gradients: TypeAlias = Sequence[Tensor | None]
Captured: TypeAlias = dict[Node | BackwardCFunction, Gradients | None]

_current_call: Callable[[], int] = torch._C._current_graph_task_id
_active_calls: dict[int, Captured] = {}  # id of an engine call -> gradients of its recv nodes


class EngineCall:
    """An engine call that captures the gradients of recv nodes.

    Usage: ``with EngineCall(nodes) as call:``.

    Args:
        nodes: The recv nodes that the call runs.

    Attributes:
        leaf: A further root for the call, the first one.
        gradient: The gradient of `leaf`.
        captured: Node of a recv -> its gradients; None if it got none.
    """

    __slots__ = ("captured", "gradient", "ids", "leaf")

    def __init__(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            node.materialize_grads = False  # type: ignore[attr-defined]  # an undefined gradient stays None
        self.captured: Captured = dict.fromkeys(nodes)
        self.ids: list[int] = []
        with torch.inference_mode(False):
            self.leaf: Tensor = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
            self.gradient: Tensor = self.leaf.detach()
        self.leaf.register_hook(partial(_register, self.ids, self.captured))  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number in self.ids:
            _active_calls.pop(number, None)


def _register(ids: list[int], captured: Captured, _: Tensor) -> None:
    number = _current_call()
    ids.append(number)
    _active_calls[number] = captured


def deliver(node: Node | BackwardCFunction, gradients: Gradients) -> bool:
    """Pass the gradients of a recv's node to the engine call that runs it.

    Args:
        node: The node.
        gradients: One for each of its outputs.

    Returns:
        Whether the call is one that captures the gradients of this node.
    """
    captured = _active_calls.get(_current_call())
    if captured is None or node not in captured:
        return False
    captured[node] = gradients
    return True
