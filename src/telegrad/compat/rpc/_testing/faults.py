"""Which messages are lost or late, by torch's names for them."""

import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from telegrad.worker.faults import DroppedMessage

__all__ = ["KINDS", "Faults", "Kind"]

_ALWAYS: Final = sys.maxsize


class Kind(NamedTuple):
    """What plays the part of one of torch's messages."""

    name: str
    scripted: bool  # torch tells calls of builtin and scripted functions from those of Python functions
    resent: bool  # torch sends it again when it is lost


KINDS: Final[Mapping[str, Kind]] = {
    "SCRIPT_CALL": Kind("call", scripted=True, resent=False),
    "PYTHON_CALL": Kind("call", scripted=False, resent=False),
    "SCRIPT_REMOTE_CALL": Kind("remote", scripted=True, resent=False),
    "PYTHON_REMOTE_CALL": Kind("remote", scripted=False, resent=False),
    "SCRIPT_RREF_FETCH_CALL": Kind("fetch", scripted=True, resent=False),
    "PYTHON_RREF_FETCH_CALL": Kind("fetch", scripted=False, resent=False),
    "RREF_FORK_REQUEST": Kind("Add", scripted=False, resent=True),
    "RREF_CHILD_ACCEPT": Kind("Accept", scripted=False, resent=True),
    "RREF_USER_DELETE": Kind("Release", scripted=False, resent=True),
    "CLEANUP_AUTOGRAD_CONTEXT_REQ": Kind("Cleanup", scripted=False, resent=True),
}


class Faults:
    """What happens to the messages of one worker: its ``send_filter``.

    Args:
        fail: torch's names of the messages that are lost.
        delay: torch's names of messages, and by how many seconds each is late.
        failures: how often each one that is sent again is lost before it gets through; the others are lost each time.

    Raises:
        ValueError: a name that is not in the table.
    """

    def __init__(self, fail: Sequence[str], delay: Mapping[str, float], failures: int) -> None:
        unknown = (set(fail) | set(delay)) - set(KINDS)
        if unknown:
            raise ValueError(f"no such messages: {', '.join(sorted(unknown))}. There are {', '.join(KINDS)}.")
        self._delay = {KINDS[name][:2]: seconds for name, seconds in delay.items()}
        lost = [KINDS[name] for name in fail if failures > 0]
        self._lost = {kind[:2]: failures if kind.resent else _ALWAYS for kind in lost}

    def __call__(self, kind: str, scripted: bool, peer: int, attempt: int = 0) -> float | None:
        """Asked before each message leaves: by how many seconds is it late?

        Args:
            attempt: how often this message has been lost before.

        Raises:
            DroppedMessage: it is lost.
        """
        if attempt < self._lost.get((kind, scripted), 0):
            raise DroppedMessage(f"a message ({kind}) to worker {peer} was lost on purpose, as rpc._testing was told")
        return self._delay.get((kind, scripted))
