"""The backward pass as data: what a worker's local graph looks like to the schedule, messages, reports and effects."""

from collections.abc import Mapping
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
]

ROOT = -1  # the source that `backward` itself is, among the sends of the worker that called it
FINAL = -1  # the stage that comes last


class Group(NamedTuple):
    """Recvs that exactly the same sources reach, so that they are complete at the same moment."""

    mask: int  # of sources, by bit
    recvs: tuple[tuple[int, int], ...]  # (id of the message that was received, the worker that sent it)


class Layout(NamedTuple):
    """A worker's local graph, as far as the schedule needs it."""

    sources: Mapping[int, int]  # id of each send recorded here, or ROOT -> its bit number
    groups: tuple[Group, ...]  # by number of sources, smaller sets first: a group's subsets stand before it
    final: tuple[tuple[int, int], ...]  # the recvs that every source reaches; they are reported by the last stage


# ---- messages and reports --------------------------------------------------------------------------------------------


class TokenKind(IntEnum):
    """What the root waits to see processed."""

    GRADIENT = 0  # number: the id of the send that the gradients are for
    MARK = 1  # number: the id of the send that takes part
    MARKED = 2  # number: the worker that is told
    FINISH = 3  # number: the worker that is told


Token = tuple[int, int]  # (TokenKind, number); exists at most once in a pass


class Report(NamedTuple):
    """What one event at one worker did, all of it."""

    event: int  # counts the worker's events: the state below is that of its latest report
    consumed: tuple[Token, ...]
    produced: tuple[tuple[Token, int], ...]  # with the worker that is to process it
    blocked: bool  # some recv has part of its gradient, and waits for a source that has not arrived
    deferred: bool  # gradients are left for the last stage, which waits for sources that may never arrive


class Gradients(NamedTuple):
    """Sender of recvs -> the workers that sent them. (The glue adds the tensors.)"""

    sends: tuple[int, ...]  # ids
    marked: bool  # the marking wave is over, so whoever was not marked by now will not be
    report: Report | None = None  # only to the root


class Mark(NamedTuple):
    """These sends of yours will get a gradient."""

    sends: tuple[int, ...]


class Marked(NamedTuple):
    """Root -> a blocked worker: the marking wave is over."""


class Finish(NamedTuple):
    """Root -> a worker with deferred work: what has not arrived will not."""


class Failed(NamedTuple):
    """Worker -> root: my part failed."""

    why: Any  # the glue's own


class Lost(NamedTuple):
    """Worker -> root: a worker that I sent something to is gone."""

    peer: int
    why: Any


class Abort(NamedTuple):
    """Root -> everybody: drop it."""

    why: Any


Message = Gradients | Mark | Marked | Finish | Report | Failed | Lost | Abort


# ---- effects ---------------------------------------------------------------------------------------------------------


class Send(NamedTuple):
    """Send it; never to oneself."""

    to: int
    message: Message


class Run(NamedTuple):
    """Run this stage, a group's number or FINAL, then call `ran`, or `failed`. Always the last effect of a sequence."""

    stage: int


class Finished(NamedTuple):
    """At the root: `backward` is done, or has failed."""

    why: Any = None


class Dropped(NamedTuple):
    """At another worker: the pass has come to a bad end; nothing of it is needed any more."""

    why: Any


Effect = Send | Run | Finished | Dropped
