"""Dispatch of work items that are not requests.

These are one-way messages, completions and events.
"""

import logging
from typing import TYPE_CHECKING, Any

from telegrad.protocols.rref import RRefId
from telegrad.wire import EventKind, Flag, Tag
from telegrad.worker.unread_failures import log_unread

if TYPE_CHECKING:
    from telegrad.worker.worker import Worker

__all__ = ["Dispatcher"]

logger: logging.Logger = logging.getLogger("telegrad")

PEER_LOST, PEER_LEFT, LOG, CALLBACK, PEER_BACK, CONNECTED, REPLACED = map(int, EventKind)

_WITH_BODY = frozenset((Tag.REFERENCES, Tag.SHUTDOWN, Tag.CONTEXT_ENDED, Tag.MEMBERSHIP))


class Dispatcher:
    """Passes work items that are not requests to the parts of the worker."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker

    def on_message(self, item: tuple[Any, ...]) -> None:
        """Handle a one-way message."""
        worker = self._worker
        _, _, peer, connection, _, tag, flags, _, body, segments, _ = item
        if tag not in _WITH_BODY:
            if tag != Tag.CONNECT:
                logger.error("worker %s sent a one-way message of unknown tag %d", worker.members.name_of(peer), tag)
            return
        try:
            plain = worker.messages.decode(flags, body, segments, [])
        except Exception as e:
            self._end_session(peer, connection, e)
            return
        if tag == Tag.REFERENCES:
            worker.references.on_message(peer, connection, plain)
        elif tag == Tag.SHUTDOWN:
            worker.ready.wait()  # a peer that joined earlier may already shut down
            stage, message = plain
            worker.shutdown.on_message(peer, stage, message)
        elif tag == Tag.CONTEXT_ENDED:
            worker.autograd.on_ended(peer, connection, plain)
        elif worker.membership is not None:
            epoch, phase = plain
            worker.membership.on_message(peer, epoch, phase)

    def _end_session(self, peer: int, connection: int, error: Exception) -> None:
        """End the session with a peer after a one-way message that cannot be read.

        No reply can refuse the message. Without it, both could wait for each other. The next call
        begins another session.
        """
        worker = self._worker
        if not worker.engine.is_open(connection):
            return
        member, why = worker.members.get(peer), f"it sent a message that this worker cannot read: {error}"
        worker.engine.remove_peer(peer, why, worker.members.incarnation_of(peer))
        if member is not None:
            worker.add_member(member)

    def on_completion(self, item: tuple[Any, ...]) -> None:
        """Process the references and the value of a reply that is not awaited any more."""
        worker = self._worker
        _, tag, flags, body, segments, peer, connection, _, _ = item[3]
        worker.messages.read_metadata(peer, connection, flags, segments)
        if tag == Tag.CREATED and not flags & Flag.LEFT_OUT:
            worker.references.created(RRefId(*worker.messages.decode(flags & ~Flag.METADATA, body, segments, [])))

    def on_event(self, item: tuple[Any, ...]) -> None:
        """Handle a peer event, or a request for the pool."""
        worker = self._worker
        _, _, event, peer, incarnation, text = item
        if event == CALLBACK:
            worker.references.collect()
            worker.autograd.collect()
            log_unread()
            worker.pool.run_submitted()
        elif event in (PEER_LOST, PEER_LEFT, PEER_BACK):
            try:
                if event == PEER_BACK:
                    worker.on_peer_back(peer)
                else:
                    worker.on_peer_lost(peer, incarnation, text, event == PEER_LEFT)
            finally:
                worker.engine.acknowledge(peer)
        elif event == CONNECTED:
            worker.on_connected(peer, incarnation, text)
        elif event == REPLACED:
            worker.fence(f"another process has taken its name, as worker {worker.members.name_of(peer)} reports")
        else:
            logger.warning("%s: %s", worker.info.name, text)
