"""Rules of faults, their text for the environment, and the rules of one worker.

The core applies them (csrc/core/faults.h). The public interface is `telegrad.testing.faults`.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from telegrad import _core
from telegrad.timeouts import FOREVER, nanoseconds
from telegrad.wire import Flag, Tag

__all__ = ["ACTIONS", "FRAME_TYPES", "KINDS", "AppliedFault", "Plan", "Rule", "WorkerFaults"]

logger: logging.Logger = logging.getLogger("telegrad")

_LARGEST: Final = (1 << 64) - 1  # of the numbers in the core

ACTIONS: Final = ("drop", "delay", "duplicate", "reorder", "cut", "corrupt")
"""Actions in the order of FaultAction (csrc/core/faults.h)."""

FRAME_TYPES: Final = {
    "Request": 16,
    "Reply": 17,
    "Oneway": 18,
    "Credit": 19,
    "Goodbye": 20,
    "Cancel": 22,
    "CallState": 23,
    "Ping": 24,
    "Pong": 25,
}
"""Types of frames after the handshake (FrameType in csrc/core/message.h)."""

_HANDSHAKE: Final = tuple(range(1, 8))


class Kind(NamedTuple):
    """Messages of one kind: types of frames, tag, and flags that they do not have."""

    types: tuple[int, ...]
    tag: int | None = None
    without: int = 0


def _frames(name: str, tag: int | None = None, without: int = 0) -> Kind:
    return Kind((FRAME_TYPES[name],), tag, without)


KINDS: Final = {
    "*": Kind(tuple(FRAME_TYPES.values())),
    "handshake": Kind(_HANDSHAKE),
    "request": _frames("Request"),
    "reply": _frames("Reply"),
    "oneway": _frames("Oneway"),
    "credit": _frames("Credit"),
    "goodbye": _frames("Goodbye"),
    "cancel": _frames("Cancel"),
    "call_state": _frames("CallState"),
    "ping": _frames("Ping"),
    "pong": _frames("Pong"),
    "call": _frames("Request", Tag.CALL, Flag.INTERNAL),
    "backward": Kind((FRAME_TYPES["Request"], FRAME_TYPES["Reply"]), Tag.GRADIENTS),
    "value": _frames("Reply", Tag.VALUE),
    "error": _frames("Reply", Tag.ERROR),
    "created": _frames("Reply", Tag.CREATED),
    "reference": _frames("Oneway", Tag.REFERENCES),
    "shutdown": _frames("Oneway", Tag.SHUTDOWN),
    "context": _frames("Oneway", Tag.CONTEXT_ENDED),
    "membership": _frames("Oneway", Tag.MEMBERSHIP),
    "connect": _frames("Oneway", Tag.CONNECT),
}
"""Kinds of messages by their public names."""

_REPEATABLE: Final = ("ping", "cancel")  # a second one changes nothing
_UNORDERED: Final = ("reference", "cancel")  # src/telegrad/protocols/README.md; a cancellation names its call


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def _is_whole(number: object, least: int) -> bool:
    return isinstance(number, int) and least <= number <= _LARGEST


@dataclass(frozen=True)
class Rule:
    """Fault for some messages of one worker to another.

    Args:
        action: ``drop`` loses the message and then ends the connection, because a transport never loses one message
            alone. ``cut`` ends the connection before the message. ``delay`` holds the message and all behind it on the
            connection. ``duplicate`` sends it twice, ``reorder`` sends it after the next one. ``corrupt`` flips a bit
            of it on its way.
        source: Name of the worker that sends; ``*`` for any.
        destination: Name of the worker that receives; ``*`` for any other one. Calls of a worker to itself use a
            connection that never breaks: name the worker twice only for messages whose loss it would notice.
        kind: Kind of message, see `telegrad.testing.faults.KINDS`.
        nth: The first of these messages that the fault is for; 1 is the next one.
        count: How many messages from there on; None for all.
        probability: Chance that the fault happens to one of them. Equal seeds choose the same ones.
        seconds: Of ``delay``: its duration; None until `telegrad.testing.faults.release`.
        part: Of ``corrupt``: ``header``, which the receiver always detects, or ``body``, which plain TCP and Unix
            sockets deliver as it is.

    Raises:
        ValueError: An argument is invalid, or the action breaks the contract of connections for this kind.

    Example::

        from telegrad.testing import faults

        lose_second_result = faults.Rule("drop", "w1", "w0", "value", nth=2)
    """

    action: str
    source: str = "*"
    destination: str = "*"
    kind: str = "*"
    nth: int = 1
    count: int | None = 1
    probability: float = 1.0
    seconds: float | None = None
    part: str = "header"

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"a fault's action has to be one of {', '.join(ACTIONS)}, not {self.action!r}")
        if self.kind not in KINDS:
            raise ValueError(f"a fault's kind has to be one of {', '.join(KINDS)}, not {self.kind!r}")
        names: tuple[object, ...] = self.source, self.destination
        if not all(isinstance(name, str) for name in names):
            raise ValueError(
                "source and destination of a fault are names of workers, or '*', not"
                f" {self.source!r} and {self.destination!r}"
            )
        if not (_is_whole(self.nth, 1) and (self.count is None or _is_whole(self.count, 1))):
            raise ValueError(
                "nth and count of a fault are whole numbers that begin at 1 and have 64 bits at most, not"
                f" {self.nth!r} and {self.count!r}"
            )
        if not (_is_number(self.probability) and 0 < self.probability <= 1):
            raise ValueError(f"a fault's probability has to be more than 0 and at most 1, not {self.probability!r}")
        if self.seconds is not None and not (
            self.action == "delay" and _is_number(self.seconds) and 0 < self.seconds < FOREVER
        ):
            raise ValueError(
                f"seconds of a fault is the duration of a delay, more than 0 and less than {FOREVER:g}, or None until"
                f" `release`: {self.seconds!r}"
            )
        if self.part not in ("header", "body") or (self.part == "body" and self.action != "corrupt"):
            raise ValueError(f"part of a fault is header or body, and of corrupt only: {self.part!r}")
        if self.action == "corrupt" and self.source == self.destination != "*":
            raise ValueError(
                f"calls of a worker to itself use a connection without a byte stream, so those of {self.source!r}"
                " cannot be corrupted: use drop, cut or delay"
            )
        allowed = {"duplicate": _REPEATABLE, "reorder": _UNORDERED}.get(self.action)
        if allowed and self.kind not in allowed:
            raise ValueError(
                f"a connection delivers each message once and in order, so {self.action} is possible for the kinds"
                f" {' and '.join(allowed)} only, not {self.kind!r}: use drop, cut or delay"
            )

    def is_from(self, source: str) -> bool:
        """Return whether the rule is about messages of this worker."""
        return self.source in ("*", source)


@dataclass(frozen=True)
class Plan:
    """Rules with a seed.

    Its text is for the option ``faults`` or the environment variable TELEGRAD_FAULTS.

    Args:
        rules: Their order matters: the first one that applies to a message does.
        seed: Decides by chance: probabilities, and which bits are flipped.

    Raises:
        ValueError: Something else than a rule is among the rules, or the seed is no whole number of 64 bits, 0 or more.

    Example::

        from telegrad.testing import cluster, faults

        plan = faults.Plan([faults.Rule("cut", "w0", "w1", "call", nth=2)])
        with cluster(2, rpc.Options(faults=str(plan))):
            assert rpc.rpc_sync("w1", max, (1, 2)) == 2
            try:
                rpc.rpc_sync("w1", max, (1, 2))
            except errors.WorkerLost as error:
                print(error)
    """

    rules: Iterable[Rule] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        rules: tuple[object, ...] = tuple(self.rules)
        object.__setattr__(self, "rules", rules)
        for rule in rules:
            if not isinstance(rule, Rule):
                raise ValueError(f"a plan consists of rules, not {rule!r}")
        if not _is_whole(self.seed, 0):
            raise ValueError(f"the seed of a plan is a whole number of 64 bits, 0 or more, not {self.seed!r}")

    def __str__(self) -> str:
        return json.dumps({"seed": self.seed, "rules": [dataclasses.asdict(rule) for rule in self.rules]})

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the plan of a text.

        Raises:
            ValueError: The text is no plan.
        """
        try:
            given: dict[str, Any] = json.loads(text)
            return cls([Rule(**rule) for rule in given.pop("rules", ())], **given)
        except (AttributeError, TypeError, ValueError) as e:
            raise ValueError(
                f"option faults (TELEGRAD_FAULTS) has to be the text of a telegrad.testing.faults.Plan, not {text!r}:"
                f" {e}"
            ) from e


class AppliedFault(NamedTuple):
    """Fault that has happened.

    Attributes:
        rule: The rule that applied.
        source: Name of the worker that sent the message.
        destination: Name of the worker to which it was sent; "" in a handshake that has not named it yet.
        nth: Number of the message among those that the rule is about.
        transport: ``shm``, ``unix``, ``tcp``, ``tls`` or ``inproc`` (calls of a worker to itself).

    Example::

        from telegrad.testing import faults

        faults.AppliedFault(faults.Rule("cut"), "w0", "w1", nth=1, transport="shm")
    """

    rule: Rule
    source: str
    destination: str
    nth: int
    transport: str


class WorkerFaults:
    """Rules of one worker."""

    def __init__(self, name: str, transports: Iterable[str], text: str) -> None:
        plan = Plan.parse(text)
        self.name = name
        self._transports = tuple(transports)
        self._rules: list[Rule] = []
        self.native: _core.Faults = _core.Faults(name, plan.seed)
        self.add(plan.rules)
        if "TELEGRAD_FAULTS" in os.environ:  # perhaps left over from a test
            logger.warning("worker %s applies fault rules, for tests (TELEGRAD_FAULTS)", name)

    def add(self, rules: Iterable[Rule]) -> None:
        """Add rules.

        Those about other workers only take a number, so that all processes count alike.
        """
        rules = tuple(rules)
        if "shm" in self._transports and any(rule.action == "corrupt" for rule in rules):
            raise ValueError("corrupt needs a byte stream: leave shm out of the option transports")
        for rule in rules:
            self._rules.append(rule)
            if not rule.is_from(self.name) or (rule.action == "corrupt" and rule.destination == self.name):
                continue  # the connection of a worker to itself has no byte stream
            kind = KINDS[rule.kind]
            self.native.add(
                id=len(self._rules) - 1,
                action=ACTIONS.index(rule.action),
                destination="" if rule.destination == "*" else rule.destination,
                types=sum(1 << each for each in kind.types),
                tag=-1 if kind.tag is None else kind.tag,
                without=kind.without,
                nth=rule.nth,
                count=rule.count or 0,
                probability=rule.probability,
                delay=0 if rule.seconds is None else nanoseconds(rule.seconds),
                body=rule.part == "body",
            )

    def remove(self, rule: Rule) -> bool:
        """Remove all rules equal to this one; return whether there was one."""
        numbers = [number for number, each in enumerate(self._rules) if each == rule]
        return sum(self.native.remove(number) for number in numbers) > 0

    def applied(self) -> list[AppliedFault]:
        """Return what has happened, in order."""
        return [
            AppliedFault(self._rules[each.rule], self.name, each.destination, each.nth, each.link.partition(":")[0])
            for each in self.native.applied()
        ]
