"""Reasons that a pass failed or does not end, and the errors of `backward`."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeAlias

from telegrad.errors import TEXT, RemoteError, WorkerLost, is_drop_in
from telegrad.protocols.backward_messages import Token, TokenKind
from telegrad.serialize.exceptions import unpack_exception
from telegrad.serialize.unpickling import PickleGate

__all__ = ["SECOND_TIME", "Reason", "RemoteFailure", "describe_awaited", "unpack_error"]

SECOND_TIME = "backward through the graph a second time"
"""Part of torch's error for a graph that has been freed."""

RemoteFailure: TypeAlias = tuple[int, bytes, str]
"""An error of another worker: worker id, packed exception, its text."""

Reason: TypeAlias = "BaseException | RemoteFailure | tuple[int, str] | str"
"""Reason that a pass failed: an error of this worker or another one, the loss of a worker, or the text of an abort."""


def unpack_error(
    why: Reason,
    worker_id: int,
    cause: BaseException | None,
    name_of: Callable[[int], str],
    lost_incarnation: Callable[[int, str], int],
    gate: PickleGate,
) -> BaseException:
    """Return the error that `backward` raises.

    Args:
        why: The reason.
        worker_id: This worker, the root.
        cause: Cause of an error of this worker that a message has caused.
        name_of: Returns the name of a worker.
        lost_incarnation: Returns the incarnation that a worker's loss is about, by the id and the reason.
        gate: Permission to load pickles.
    """
    if isinstance(why, BaseException):
        return why
    if isinstance(why, str):
        return RuntimeError(why)
    if len(why) == 2:
        peer, reason = why
        return WorkerLost(name_of(peer), reason, lost_incarnation(peer, reason))
    worker, packed, text = why
    error = unpack_exception(packed, gate)
    if cause is not None and worker == worker_id:
        error.__cause__ = cause
    if isinstance(error, RemoteError) and is_drop_in():
        error.__dict__[TEXT] = f"Error on Node {worker}: {text}\n{error.__dict__[TEXT]}"
    return error


def describe_awaited(awaited: Iterable[tuple[Token, int]], name_of: Callable[[int], str]) -> str:
    """Describe the messages that the root waits for.

    Args:
        awaited: The messages, each with the worker that is to process it; -1 if it is not known yet.
        name_of: Returns the name of a worker.
    """
    nouns = {TokenKind.GRADIENT: "gradients", TokenKind.MARK: "marks"}
    found = Counter((worker, nouns.get(TokenKind(kind), "its report")) for (kind, _), worker in awaited)
    rows = [
        f"worker {name_of(worker) if worker >= 0 else '(not known yet)'}: {count} x {what}"
        for (worker, what), count in sorted(found.items())
    ]
    return "; ".join(rows) if rows else "nothing"
