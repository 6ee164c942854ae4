"""Outages of the store of a group, as a member handles them.

If the connection is lost, the member connects again, for the lifetime of a lease. Then it goes on without the store,
as that has ended. A store that is silent, because its host is stopped, has not ended.
"""

import logging
import math
import time

from telegrad.group.log import GroupLog
from telegrad.group.store_waits import StoreGone, StoreUnresponsive
from telegrad.protocols.leases import Timing

__all__ = ["StoreOutage"]

logger: logging.Logger = logging.getLogger("telegrad")

_RECONNECT_TIMEOUT = 1.5  # s of one attempt to connect to the store again; the end of the member may wait for it


class StoreOutage:
    """Outage of the store of one member, if there is one.

    Args:
        name: Name of the member.
        log: Log of its group.
        timing: Times of its lease.
    """

    def __init__(self, name: str, log: GroupLog, timing: Timing) -> None:
        self._name = name
        self._log = log
        self._timing = timing
        self._gone_since: float | None = None  # when the connection was found lost
        self._silence = ""  # error of the first operation without a reply
        self.is_late: bool = False  # a thread has stopped waiting for the log to be read

    @property
    def reason(self) -> str:
        """Reason that the worker learns of no change of the group; "" without one."""
        return self._silence or ("the store of the group does not reply" if self.is_late else "")

    def end(self) -> None:
        """Note that the store replies."""
        self._gone_since = None
        if self._silence:
            self._silence = ""
            logger.info("the store of the group of worker %s replies again", self._name)

    def note_silence(self, error: RuntimeError) -> None:
        """Note that the store does not reply, which is logged once."""
        if not self._silence:
            self._silence = str(error)
            logger.warning(
                "worker %s gets no reply from the store of its group: %s. Until it does, it renews no lease and learns"
                " of no change of the group. Calls go on. Check the host of the store.",
                self._name,
                error,
            )

    def connect_again(self) -> bool:
        """Connect to the store again; see `GroupStore.reconnect`."""
        return self._log.reconnect(min(self._timing.lifetime / 4, _RECONNECT_TIMEOUT))

    def reconnect(self, lost: RuntimeError) -> float | None:
        """Connect to the store again.

        Args:
            lost: Error of the lost connection.

        Returns:
            Seconds until the next attempt to use the store; None if the worker goes on without it.
        """
        if isinstance(lost, StoreUnresponsive):
            self.note_silence(lost)
            return math.inf
        if self._log.store.recovers:
            logger.warning("worker %s cannot reach the store of its group: %s", self._name, lost)
            return math.inf
        is_first = self._gone_since is None
        since = self._gone_since = self._gone_since or time.monotonic()
        try:
            if self.connect_again():
                logger.info("worker %s has connected to the store of its group again, after: %s", self._name, lost)
                return 0.0 if is_first else self._timing.renewal / 2
        except StoreGone as e:
            if is_first:
                logger.info("worker %s has lost the connection to the store of its group: %s", self._name, e)
            if time.monotonic() - since < self._timing.lifetime:
                return self._timing.renewal / 2
            lost = e
        logger.info("worker %s goes on without the store of its group: %s", self._name, lost)
        return None
