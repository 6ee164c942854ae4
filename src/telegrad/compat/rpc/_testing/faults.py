"""Which messages are lost or late, by torch's names for them."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from telegrad.worker.calls import DroppedMessage

__all__ = ["KINDS", "RESEND_AFTER", "Faults", "Kind"]

RESEND_AFTER: Final = 0.1
"""Seconds until a lost message of the reference protocol is sent again."""


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
        failures: how often one that is sent again is lost before it gets through.

    Raises:
        ValueError: a name that is not in the table.
    """

    def __init__(self, fail: Sequence[str], delay: Mapping[str, float], failures: int) -> None:
        unknown = (set(fail) | set(delay)) - set(KINDS)
        if unknown:
            raise ValueError(f"no such messages: {', '.join(sorted(unknown))}. There are {', '.join(KINDS)}.")
        self._delay = {KINDS[name][:2]: seconds for name, seconds in delay.items()}
        self._lost = set()
        for kind in (KINDS[name] for name in fail if failures > 0):
            if kind.resent:
                self._delay[kind[:2]] = self._delay.get(kind[:2], 0.0) + failures * RESEND_AFTER
            else:
                self._lost.add(kind[:2])

    def __call__(self, kind: str, scripted: bool, peer: int) -> float | None:
        """Asked before each message leaves: by how many seconds is it late?

        Raises:
            DroppedMessage: it is lost.
        """
        if (kind, scripted) in self._lost:
            raise DroppedMessage(f"a message ({kind}) to worker {peer} was lost on purpose, as rpc._testing was told")
        return self._delay.get((kind, scripted))
