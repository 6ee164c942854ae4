"""Faults of messages, by torch's names."""

import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from telegrad.worker.calls.faults import DroppedMessage

__all__ = ["KINDS", "Faults", "Kind"]

_ALWAYS: Final = sys.maxsize


class Kind(NamedTuple):
    """Telegrad's counterpart of one of torch's messages."""

    name: str
    scripted: bool  # torch has separate messages for builtin and scripted functions
    resent: bool  # torch sends it again after a loss


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
    """Send filter of a worker that loses and delays messages.

    Args:
        fail: torch's names of the messages to lose.
        delay: torch's names of the messages to delay, with the delay of each in seconds.
        failures: number of losses of a message that is sent again before it arrives; other messages are always lost.

    Raises:
        ValueError: a name is not in the table.
    """

    def __init__(self, fail: Sequence[str], delay: Mapping[str, float], failures: int) -> None:
        unknown = (set(fail) | set(delay)) - set(KINDS)
        if unknown:
            raise ValueError(f"no such messages: {', '.join(sorted(unknown))}. There are {', '.join(KINDS)}.")
        self._delay = {KINDS[name][:2]: seconds for name, seconds in delay.items()}
        lost = [KINDS[name] for name in fail if failures > 0]
        self._lost = {kind[:2]: failures if kind.resent else _ALWAYS for kind in lost}

    def __call__(self, kind: str, scripted: bool, peer: int, attempt: int = 0) -> float | None:
        """Return the delay of a message in seconds, before it is sent.

        Args:
            attempt: number of earlier losses of this message.

        Raises:
            DroppedMessage: the message is lost.
        """
        if attempt < self._lost.get((kind, scripted), 0):
            raise DroppedMessage(f"a message ({kind}) to worker {peer} was lost on purpose (rpc._testing)")
        return self._delay.get((kind, scripted))
