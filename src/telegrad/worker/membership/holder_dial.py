"""Dial of the member of the name that a newcomer asks for.

The member proves its identity in the handshake. Then the initiator ends the attempt, so the member gets no new session
and no new peer. The initiator does this because it has been given a later incarnation of the member: to the core, an
older process has answered.
"""

import threading
import time

from telegrad import _core
from telegrad.group.addresses import candidates, host_key
from telegrad.group.records import Group, Member
from telegrad.options import Options
from telegrad.types import WorkerInfo
from telegrad.wire import CompletionField, Loss
from telegrad.wire.ints import TAG_CALL
from telegrad.worker.native import make_engine

__all__ = ["HolderDial"]

_SECOND = 1_000_000_000
_INTERVALS = 3  # of heartbeats, within which the core loses a silent peer: csrc/core/silence.h
_NO_MEMBER = -1  # id of the initiator
_LATER = (1 << 64) - 1  # incarnation
_STOP_TIMEOUT = 2.0  # s for the thread to end once the engine has stopped


class HolderDial:
    """Attempt to reach a member, which ends within the times of the failure detector.

    Args:
        member: Record of the member.
        group: Token and secret of the group.
        options: Options of the newcomer.
    """

    def __init__(self, member: Member, group: Group, options: Options) -> None:
        limits = (options.connect_timeout, options.handshake_timeout, _INTERVALS * options.heartbeat)
        self._limit = min(limit for limit in limits if limit > 0)
        self._begun = time.monotonic()
        self._member = member
        self._addresses = candidates(member.addresses, member.host == host_key(), options.transports)
        self._has_answered: bool | None = None
        # The certificate of the newcomer, if any, has its name.
        self._engine: _core.Engine = make_engine(WorkerInfo(member.name, _NO_MEMBER), _LATER, group, options, None)
        self._thread = threading.Thread(target=self._run, name=f"telegrad-{member.name}-dial", daemon=True)
        self._thread.start()

    def answers(self) -> bool | None:
        """Return whether the member has answered; None while it still may."""
        if self._has_answered is None and time.monotonic() - self._begun >= self._limit:
            return False
        return self._has_answered

    def close(self) -> None:
        """End the attempt."""
        self._engine.stop(0)
        self._thread.join(_STOP_TIMEOUT)

    def _run(self) -> None:
        try:
            self._has_answered = any(self._is_at(address) for address in self._addresses)
        except RuntimeError:  # the engine has stopped
            self._has_answered = False

    def _is_at(self, address: str) -> bool:
        member, engine = self._member, self._engine
        engine.set_peer(member.id, member.name, _LATER, [])
        engine.set_peer(member.id, member.name, 0, [address])  # 0: any incarnation may answer
        timeout = int(self._limit / len(self._addresses) * _SECOND)
        completion = engine.call(member.id, TAG_CALL, 0, 0, None, b"", None, timeout, False, None)
        return bool(completion[CompletionField.LOSS] == Loss.OLDER)
