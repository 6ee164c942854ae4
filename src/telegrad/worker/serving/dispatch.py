"""Dispatch of work items that are not requests.

These are one-way messages, completions and events.
"""

import logging
from typing import TYPE_CHECKING, Any

from telegrad.protocols.rref import RRefId
from telegrad.wire import EventKind, Flag, Tag
from telegrad.worker import lifecycle_log
from telegrad.worker.unread_failures import log_unread

if TYPE_CHECKING:
    from telegrad.worker.worker import Worker

__all__ = ["Dispatcher"]

logger: logging.Logger = logging.getLogger("telegrad")

PEER_LOST, PEER_LEFT, LOG, CALLBACK, PEER_BACK, CONNECTED = map(int, EventKind)


class Dispatcher:
    """Passes work items that are not requests to the parts of the worker."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker

    def on_message(self, item: tuple[Any, ...]) -> None:
        """Handle a one-way message."""
        worker = self._worker
        _, _, peer, _, _, tag, flags, _, body, segments, _ = item
        if tag == Tag.REFERENCES:
            worker.references.on_message(peer, worker.messages.decode(flags, body, segments, []))
        elif tag == Tag.SHUTDOWN:
            worker.ready.wait()  # a peer that joined earlier may already shut down
            stage, plain = worker.messages.decode(flags, body, segments, [])
            worker.stages[stage].on_message(peer, plain)
        elif tag == Tag.CONTEXT_ENDED:
            worker.autograd.on_ended(peer, worker.messages.decode(flags, body, segments, []))
        elif tag != Tag.CONNECT:
            logger.error("worker %s sent a one-way message of unknown tag %d", worker.name_of(peer), tag)

    def on_completion(self, item: tuple[Any, ...]) -> None:
        """Process the references and the value of a reply that is not awaited any more."""
        worker = self._worker
        _, tag, flags, body, segments, peer, _ = item[3]
        worker.messages.read_metadata(peer, flags, segments)
        if tag == Tag.CREATED and not flags & Flag.LEFT_OUT:
            worker.references.created(RRefId(*worker.messages.decode(flags & ~Flag.METADATA, body, segments, [])))

    def on_event(self, item: tuple[Any, ...]) -> None:
        """Handle a peer event, or work of the pool itself."""
        worker = self._worker
        _, _, event, peer, _, text = item
        if event == CALLBACK:
            worker.references.collect()
            log_unread()
            worker.pool.run_submitted()
        elif event in (PEER_LOST, PEER_LEFT):
            if event == PEER_LOST:
                lifecycle_log.lost(worker, peer, text)
            else:
                lifecycle_log.peer_left(worker, peer, text)
                worker.departed_peers.add(peer)
            worker.lost_peers[peer] = text
            if not (
                worker.is_leaving and event == PEER_LEFT
            ):  # while leaving, references that a departed peer still holds are reported as leaks
                worker.references.peer_lost(peer, text)
            worker.autograd.peer_lost(peer, text)
            for stage in worker.stages:
                stage.peer_gone(peer, event == PEER_LEFT)
            for listener in list(worker.loss_listeners):
                listener()
        elif event == PEER_BACK:
            worker.lost_peers.pop(peer, None)
            worker.departed_peers.discard(peer)
            worker.references.peer_joined(peer)
        elif event == CONNECTED:
            lifecycle_log.connected(worker, peer, text)
        else:
            logger.warning("%s: %s", worker.info.name, text)
