"""Data of the backward pass: local graph, messages, reports, effects."""

from enum import IntEnum
from typing import Any, NamedTuple

__all__ = [
    "FINAL",
    "ROOT",
    "Abort",
    "Dropped",
    "Effect",
    "Failed",
    "Finish",
    "Finished",
    "Gradients",
    "Group",
    "Layout",
    "Lost",
    "Mark",
    "Marked",
    "Message",
    "Report",
    "Run",
    "Send",
    "Token",
    "TokenKind",
    "UnknownSend",
]

ROOT = -1  # source number of the call of `backward`, among the sends of the root worker
FINAL = -1  # number of the last stage


class Group(NamedTuple):
    """Recvs that exactly the same sources reach; they complete at the same time."""

    mask: int  # of sources, by bit
    recvs: tuple[tuple[int, int], ...]  # (id of the message that was received, the worker that sent it)


class Layout(NamedTuple):
    """The parts of a worker's local graph that the schedule needs.

    In a plain context the schedule gets one subgraph after the other, as gradients arrive. `final` is then empty.
    """

    sources: dict[int, int]  # id of each send recorded here, or ROOT -> its bit number
    groups: list[Group]  # of each subgraph by number of sources, smallest first: a group's subsets come before it
    final: tuple[tuple[int, int], ...]  # the recvs that every source reaches; the last stage completes them


class UnknownSend(LookupError):
    """A gradient or a mark arrived for a send that is not in the local graph."""

    def __init__(self, send: int, why: str) -> None:
        super().__init__(f"message {send} has {why}")
        self.send = send


# ---- messages and reports --------------------------------------------------------------------------------------------


class TokenKind(IntEnum):
    """Kind of a message that the root waits to see processed."""

    GRADIENT = 0  # number: id of the send that gets the gradients
    MARK = 1  # number: id of the send that takes part
    MARKED = 2  # number: worker that is notified
    FINISH = 3  # number: worker that is notified


Token = tuple[int, int]  # (TokenKind, number); exists at most once in a pass


class Report(NamedTuple):
    """Complete result of one event at one worker."""

    event: int  # counts the worker's events; the state of the highest one is current
    consumed: tuple[Token, ...]
    produced: tuple[tuple[Token, int], ...]  # with the worker that is to process it
    blocked: bool  # some recv has part of its gradient and waits for a source that has not arrived
    deferred: bool  # gradients are left for the last stage, which waits for sources that may never arrive


class Gradients(NamedTuple):
    """Gradients of recvs, to the worker that sent these messages.

    The caller adds the tensors.
    """

    sends: tuple[int, ...]  # ids
    marked: bool  # the mark phase has ended: sends not marked yet stay unmarked
    report: Report | None = None  # only to the root


class Mark(NamedTuple):
    """Worker -> worker: these sends of the receiver will get a gradient."""

    sends: tuple[int, ...]


class Marked(NamedTuple):
    """Root -> blocked worker: the mark phase has ended."""


class Finish(NamedTuple):
    """Root -> worker with deferred gradients: no further source will arrive."""


class Failed(NamedTuple):
    """Worker -> root: the pass failed at this worker."""

    why: Any  # the caller's error object


class Lost(NamedTuple):
    """Worker -> root: a worker that the sender has sent a message to is lost."""

    peer: int
    why: Any


class Abort(NamedTuple):
    """Root -> all workers: drop the pass."""

    why: Any


Message = Gradients | Mark | Marked | Finish | Report | Failed | Lost | Abort


# ---- effects ---------------------------------------------------------------------------------------------------------


class Send(NamedTuple):
    """Send the message to another worker, never to this one."""

    to: int
    message: Message


class Run(NamedTuple):
    """Run this stage, then call `ran` or `failed`.

    Always the last effect of a sequence.

    `stage` is a group's number or FINAL.
    """

    stage: int


class Finished(NamedTuple):
    """At the root: `backward` has ended, with the error `why` if it failed."""

    why: Any = None


class Dropped(NamedTuple):
    """At another worker: the pass has failed and its state can be dropped."""

    why: Any


Effect = Send | Run | Finished | Dropped
