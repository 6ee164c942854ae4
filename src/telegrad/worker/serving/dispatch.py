"""What reaches a worker besides requests: messages that are not answered, outcomes of calls, news of peers."""

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
    """Hands each item of `Engine.next` that is not a request to the part of the worker that it is for."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker

    def on_message(self, item: tuple[Any, ...]) -> None:
        """A message that is not answered."""
        worker = self._worker
        _, _, peer, _, _, tag, flags, _, body, segments, _ = item
        if tag == Tag.REFERENCES:
            worker.references.on_message(peer, worker.messages.decode(flags, body, segments, []))
        elif tag == Tag.SHUTDOWN:
            worker.ready.wait()  # one that has joined already may be done already, too
            stage, plain = worker.messages.decode(flags, body, segments, [])
            worker.stages[stage].on_message(peer, plain)
        elif tag == Tag.CONTEXT_ENDED:
            worker.autograd.on_ended(peer, worker.messages.decode(flags, body, segments, []))
        elif tag != Tag.CONNECT:
            logger.error("worker %s sent a one-way message of unknown tag %d", worker.name_of(peer), tag)

    def on_completion(self, item: tuple[Any, ...]) -> None:
        """A reply that no part of this worker waits for any more, but that brought something: take it up."""
        worker = self._worker
        _, tag, flags, body, segments, peer, _ = item[3]
        worker.messages.read_metadata(peer, flags, segments)
        if tag == Tag.CREATED and not flags & Flag.LEFT_OUT:
            worker.references.created(RRefId(*worker.messages.decode(flags & ~Flag.METADATA, body, segments, [])))

    def on_event(self, item: tuple[Any, ...]) -> None:
        """News of a peer, or the pool's own work."""
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
            if not (worker.is_leaving and event == PEER_LEFT):  # then what it still holds is a leak to report
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
