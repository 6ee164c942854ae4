"""Refusal of local passes with incomplete gradients.

`torch.autograd.grad` and `backward(inputs=...)` run only nodes that lead to the inputs. So they never run the recvs of
a context, which refuse a local pass, and what other workers would return to the inputs would be missing.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from telegrad._core import GraphWalk
from telegrad.autograd.context import Context, Entry, Sent
from telegrad.autograd.execution.wanted import entry_of
from telegrad.autograd.graph.deep_graph import RecursionGuard
from telegrad.autograd.graph.local_graph import ends_of, is_outer, kinds
from telegrad.autograd.recording import LOCAL_BACKWARD

__all__ = ["HasContexts", "refuse_incomplete", "register"]

INCOMPLETE = f"{LOCAL_BACKWARD} For the local part of a gradient, detach() the tensors that other workers have sent."


class HasContexts(Protocol):
    """The open contexts of one worker (`Contexts`)."""

    table: dict[int, Context]


_owners: "weakref.WeakSet[HasContexts]" = weakref.WeakSet()  # of all workers of this process


def register(owner: HasContexts) -> None:
    """Include the contexts of a worker in `refuse_incomplete`."""
    _owners.add(owner)


def refuse_incomplete(roots: Sequence[Entry], inputs: Sequence[Entry]) -> None:
    """Raise RuntimeError if other workers could return gradients to the inputs.

    They return what they get through recvs below the roots to sends above the inputs. A recv below an input returns it
    nothing: its message arrived before the input was computed.
    """
    contexts = [context for owner in list(_owners) for context in list(owner.table.values()) if context.receipts]
    if not contexts:
        return
    recvs = {node for node in ends_of([entry_of(root) for root in roots if _has_graph(root)]) if not is_outer(node)}
    if not recvs:
        return
    for entry in [entry_of(tensor) for tensor in inputs if _has_graph(tensor)]:
        returning = recvs if isinstance(entry, Tensor) else recvs.difference(ends_of([entry]))
        if any(_returns(context, returning, entry) for context in contexts):
            raise RuntimeError(INCOMPLETE)


def _has_graph(tensor: Entry) -> bool:
    return not isinstance(tensor, Tensor) or tensor.requires_grad  # torch has the error


def _returns(context: Context, recvs: Iterable[torch.autograd.graph.Node], entry: Entry) -> bool:
    """Return whether recvs are of a context, and a tensor sent in it leads to `entry`."""
    with context.lock:
        own = {received.node for received in context.receipts.values()}
        sends = list(context.sends.values())
    return not own.isdisjoint(recvs) and _reaches(sends, entry)


def _reaches(sends: Iterable[Sent], entry: Entry) -> bool:
    walk = GraphWalk(kinds, RecursionGuard)
    try:
        for sent in sends:
            walk.walk([None if isinstance(e, Tensor) and not e.requires_grad else e for e in sent.edges])
    finally:
        if walk.guard is not None:
            walk.guard.close()  # type: ignore[attr-defined]
    found = entry if isinstance(entry, Tensor) else entry.node
    return any(node is found for node in walk.nodes)
