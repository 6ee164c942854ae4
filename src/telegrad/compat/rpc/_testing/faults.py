"""Faults of messages, by torch's names: an interceptor of Telegrad.

It is an interceptor of one worker, not of the program, because torch's faults also apply to internal calls and to the
one-way messages of references and contexts, which programs do not see.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from telegrad.errors import TelegradError
from telegrad.worker.calls.callables import is_scripted
from telegrad.worker.calls.interception import ResolvedCall
from telegrad.worker.calls.interceptors import InterceptedCall, Proceed, failed

__all__ = ["KINDS", "DroppedMessage", "Faults", "Kind"]

_ALWAYS: Final = sys.maxsize
_FIRST_RESEND: Final = 0.01  # s after the first loss of a message; twice as long after each further one


class DroppedMessage(TelegradError):
    """Error of a call whose request was lost on purpose."""


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
    """Interceptor that loses and delays the messages of a worker.

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

    def __call__(self, call: InterceptedCall, proceed: Proceed, /) -> object:
        """Lose, delay or send a call or a one-way message."""
        assert isinstance(call, ResolvedCall)
        if call.form is None:
            self._send(call, proceed, 0)
            return None
        kind = _kind_of(call)
        if self.loses(*kind):
            return failed(
                DroppedMessage(f"a message ({kind[0]}) to worker {call.peer} was lost on purpose (rpc._testing)")
            )
        return proceed(dataclasses.replace(call, delay=call.delay + self.delay_of(*kind)))

    def loses(self, kind: str, scripted: bool, attempt: int = 0) -> bool:
        """Return whether a message gets lost.

        Args:
            kind: `Kind.name` of the message.
            scripted: Whether it is about a builtin or scripted function.
            attempt: Number of earlier losses of this message.
        """
        return attempt < self._lost.get((kind, scripted), 0)

    def delay_of(self, kind: str, scripted: bool) -> float:
        """Return the delay of a message in seconds."""
        return self._delay.get((kind, scripted), 0.0)

    def _send(self, message: ResolvedCall, proceed: Proceed, attempt: int) -> None:
        """Send a message that must arrive, again and later each time it gets lost."""
        kind = str(message.function)
        if self.loses(kind, False, attempt):
            again = partial(self._send, message, proceed, attempt + 1)
            message.calls.open_work.delay(_FIRST_RESEND * 2**attempt, again)
        else:
            proceed(dataclasses.replace(message, delay=self.delay_of(kind, False)))


def _kind_of(call: ResolvedCall) -> tuple[str, bool]:
    """Return the kind of a call's message, and whether its function is scripted."""
    form = call.form
    assert form is not None
    kind = "remote" if form.keep_as is not None else "fetch" if form.function is None else "call"
    return kind, is_scripted(form.function) if form.receiver is None else form.receiver._scripted
