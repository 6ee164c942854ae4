"""Changes of a group and its connections, passed to the parts of a worker."""

from typing import Any

from telegrad.group import addresses
from telegrad.group.records import Member
from telegrad.options import Options
from telegrad.types import WorkerInfo
from telegrad.worker import lifecycle_log
from telegrad.worker.autograd_hooks import AutogradHooks
from telegrad.worker.closed import AnyEngine
from telegrad.worker.losses import LossReason
from telegrad.worker.membership.members import Members
from telegrad.worker.membership.service import MembershipService
from telegrad.worker.membership.shutdown_barrier import GracefulShutdown
from telegrad.worker.refs.references import References
from telegrad.worker.serving.once import RememberedRuns

__all__ = ["MemberChanges"]


class MemberChanges:
    """Part of `Worker` that handles changes of its group and the ends of connections."""

    info: WorkerInfo
    options: Options
    host: str
    static: bool
    joined: bool
    member: Member
    engine: AnyEngine
    members: Members
    membership: MembershipService | None
    references: References
    remembered_runs: RememberedRuns
    autograd: AutogradHooks[Any]
    shutdown: GracefulShutdown

    def add_member(self, member: Member) -> None:
        """Add another worker of the group, or its new process.

        The first call to it connects.
        """
        if member.id == self.info.id:
            return
        known = self.members.get(member.id)
        returned = self.members.add(member)
        if known is not None and known.incarnation < member.incarnation:
            self.remembered_runs.forget_caller(known.incarnation)
        if returned or member.id in self.members.lost:
            self._admit_again(member.id)
        usable = addresses.candidates(member.addresses, member.host == self.host, self.options.transports)
        self.engine.set_peer(member.id, member.name, member.incarnation, usable)
        if returned:
            self.shutdown.peer_back(member.id)
        self.members.notify()

    def remove_member(self, worker_id: int, reason: str) -> None:
        """Remove a worker that has left the group."""
        member = self.members.get(worker_id)
        incarnation = self.members.connected.get(worker_id, 0 if member is None else member.incarnation)
        self.remembered_runs.forget_caller(incarnation)
        self.members.losses.record(worker_id, incarnation, reason)
        self.members.retire(worker_id, reason)
        self.engine.disconnect(worker_id, reason, incarnation)
        self._release_peer(worker_id, LossReason(reason, incarnation), gone=True)
        lifecycle_log.peer_left(self, worker_id, reason)
        self.members.mark_lost(worker_id, incarnation, reason, departed=True)
        self.members.notify()

    def lose_member(self, worker_id: int, incarnation: int, reason: str) -> None:
        """Remove a worker that the group has lost. A static group keeps its name."""
        self.remembered_runs.forget_caller(incarnation)
        self.members.losses.record(worker_id, incarnation, reason)
        if not self.static:
            self.members.retire(worker_id, reason)
        self.engine.remove_peer(worker_id, reason, incarnation)
        if self.members.connected.get(worker_id, 0) <= incarnation:  # else its successor has its name
            known = worker_id in self.members.lost
            if not known:
                lifecycle_log.lost(self, worker_id, reason)
                self.members.mark_lost(worker_id, incarnation, reason, departed=False)
            # Also if its session has ended before: messages have waited for another one, and will not be sent.
            self._release_peer(worker_id, LossReason(reason, incarnation), gone=True)
            if not known:
                self.shutdown.peer_gone(worker_id, False)
        self.members.notify()

    def on_connected(self, peer: int, incarnation: int, text: str) -> None:
        """Handle the first connection to a peer, or to its new process."""
        lifecycle_log.connected(self, peer, text)
        self.members.mark_connected(peer, incarnation)
        member = self.members.get(peer)
        if self.membership is not None and (member is None or member.incarnation != incarnation):
            self.membership.notify()

    def on_peer_lost(self, peer: int, incarnation: int, reason: str, departed: bool) -> None:
        """Handle the end of the session with a peer.

        Args:
            peer: Id of the peer.
            incarnation: Incarnation of the peer.
            reason: Why the session ended.
            departed: The peer sent a goodbye.
        """
        again = peer in self.members.lost
        gone = departed or again  # else messages to it may begin another session
        if not self.members.mark_lost(peer, incarnation, reason, departed):
            self._release_peer(peer, LossReason(reason, incarnation), gone=False)
            return
        if departed:
            self.remembered_runs.forget_caller(incarnation)
        if departed:
            lifecycle_log.peer_left(self, peer, reason)
        else:
            lifecycle_log.lost(self, peer, reason, again)
        # While this worker leaves, references that a departed peer still holds are reported as leaks.
        why = LossReason(reason, incarnation)
        self._release_peer(peer, why, gone, keep_references=self.shutdown.is_leaving and departed)
        self.shutdown.peer_gone(peer, departed)
        self.members.notify()
        if self.membership is not None:
            self.membership.suspect(peer, incarnation, reason, departed)

    def on_peer_back(self, peer: int) -> None:
        """Handle the return of a lost peer."""
        self._admit_again(peer)
        self.shutdown.peer_back(peer)

    def _admit_again(self, peer: int) -> None:
        self.members.mark_present(peer)
        self.references.peer_joined(peer)
        self.autograd.peer_joined(peer)  # in the epoch that the references have begun

    def _release_peer(self, peer: int, reason: LossReason, gone: bool, keep_references: bool = False) -> None:
        if gone:
            self.members.removed.add(peer)
        if not keep_references:
            self.references.peer_lost(peer, reason, gone)
        self.autograd.peer_lost(peer, str(reason))  # in the epoch that the references have begun
        for listener in list(self.members.session_listeners):
            listener(peer, reason)

    def _read_store(self) -> None:
        """Apply new entries of the group's log: an unknown worker may have joined."""
        if self.membership is not None:
            self.membership.refresh()
