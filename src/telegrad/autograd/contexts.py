"""The autograd contexts of one worker: how they begin here, and how they end.

A context begins where a program opens it, its *root*, and on every other worker with the first request made in it that
comes there. Each worker counts the requests that it sends in a context, by receiver, and those that come, by sender.
When it ends, whoever sent requests tells the receivers how many these were; they end it too, and tell theirs.

A request may come later than the word of the end, whether its caller has given it up or it was overtaken. It must not
begin the context anew. So a worker remembers an ended context as long as the counts differ, and no longer: until all
requests of those who told it have come, and all who sent requests have told it. A context that was opened and left
without a request to anybody costs no message and no memory.

The root remembers nothing: its ids are never used twice, so what is not in its table has ended.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from telegrad.autograd.context import Context
from telegrad.autograd.recording import received, sent
from telegrad.errors import NotInitialized

__all__ = ["ID_BITS", "Contexts"]

ID_BITS = 48  # of a context's and a message's id; above them stands the worker that made it
_MOST_LATE = 4096  # ended contexts that are remembered; a request that timed out may never have left


class Contexts:
    """The table of one worker. Thread-safe; no lock is held while a message is sent or a tensor dropped.

    Args:
        me: the worker's id.
        first_id: where counters start; no earlier incarnation of the worker may have used one from there on.
        tell: sends a peer the word that a context has ended: (peer, (context id, number of requests)).
        ended: called with each context that has ended, and why.
    """

    def __init__(
        self,
        me: int,
        first_id: int,
        tell: Callable[[int, tuple[int, int]], None],
        ended: Callable[[Context, str], None],
    ) -> None:
        self.me = me
        self.table: dict[int, Context] = {}
        self.late: dict[int, dict[int, int]] = {}
        """Ended contexts: by peer, the requests that it has told of, less those that came. Never 0."""
        self.left_open: int = 0
        """How many that were opened here had not been left when the worker was closed."""
        self._tell = tell
        self._ended = ended
        self._closed = False
        self._lock = threading.Lock()
        base = me << ID_BITS
        self._context_ids = itertools.count(base + first_id % (1 << ID_BITS) + 1)
        self._message_ids = itertools.count(base + first_id % (1 << ID_BITS) + 1)

    @property
    def max_id(self) -> int:
        """The largest id that this worker may give."""
        return (self.me << ID_BITS) + (1 << ID_BITS) - 1

    # ---- life

    def open(self) -> Context:
        """A new context, whose root is this worker.

        Raises:
            NotInitialized: the worker is closed.
        """
        if self._closed:
            raise NotInitialized
        context = Context(next(self._context_ids))
        self.table[context.id] = context
        return context

    def find(self, context_id: int) -> Context | None:
        """The context of an id, if it has not ended here."""
        return self.table.get(context_id)

    def arrived(self, context_id: int, peer: int) -> Context | None:
        """A request made in a context has come; see `AutogradHooks`."""
        with self._lock:
            context = self.table.get(context_id)
            if peer == self.me or self._closed:
                return context
            if context is None:
                if context_id >> ID_BITS == self.me:
                    return None
                late = self.late.get(context_id)
                if late is not None:
                    self._settle(context_id, late, peer, -1)
                    return None
                context = self.table[context_id] = Context(context_id)
            context.heard[peer] = context.heard.get(peer, 0) + 1
        return context

    def end(self, context: Context, why: str = "it was left") -> None:
        """Ends a context here, and wherever requests were sent in it."""
        with self._lock:
            if self.table.pop(context.id, None) is None:
                return
            if context.heard and context.id >> ID_BITS != self.me:
                self._remember(context.id, {peer: -count for peer, count in context.heard.items()})
        self._leave(context, why)

    def on_ended(self, peer: int, context_id: int, requests: int) -> None:
        """A peer says that a context has ended, in which it has sent this worker so many requests."""
        if context_id >> ID_BITS == self.me:
            return  # one's own ends when it is left
        with self._lock:
            context = self.table.pop(context_id, None)
            late = self.late.get(context_id)
            if late is None:
                late = {} if context is None else {who: -count for who, count in context.heard.items()}
                self._remember(context_id, late)
            self._settle(context_id, late, peer, requests)
        if context is not None:
            self._leave(context, f"worker {peer} said so")

    def _leave(self, context: Context, why: str) -> None:
        """It is in no table any more."""
        with context.lock:
            context.ended = True
            asked, context.asked = context.asked, {}
            gone = context.sends, context.receipts, context.gradients
            context.sends, context.receipts, context.gradients = {}, {}, {}
        self._ended(context, why)
        del gone
        for peer, requests in asked.items():
            self._tell(peer, (context.id, requests))

    # ---- with the lock held

    def _remember(self, context_id: int, late: dict[int, int]) -> None:
        if len(self.late) >= _MOST_LATE:
            self.late.pop(next(iter(self.late)))
        self.late[context_id] = late

    def _settle(self, context_id: int, late: dict[int, int], peer: int, change: int) -> None:
        balance = late.pop(peer, 0) + change
        if balance:
            late[peer] = balance
        if not late:
            self.late.pop(context_id, None)

    # ---- the group

    def peer_lost(self, peer: int) -> list[Context]:
        """A worker is gone: the contexts that it opened end, and those whose requests came from nobody else. Returns
        the others."""
        with self._lock:
            for context_id, late in list(self.late.items()):
                if late.pop(peer, 0) and not late:
                    del self.late[context_id]
            ends: list[Context] = []
            stay: list[Context] = []
            for context in list(self.table.values()):  # others open theirs without the lock
                mine = context.id >> ID_BITS == self.me
                heard = context.heard.pop(peer, 0)
                orphan = not mine and heard and not context.heard
                (ends if orphan or context.id >> ID_BITS == peer else stay).append(context)
        for context in ends:
            self.end(context, f"worker {peer} is lost")
        for context in stay:
            with context.lock:
                context.asked.pop(peer, None)
                gone = [message for message, sent in context.sends.items() if sent.peer == peer]
                dropped = [context.sends.pop(message) for message in gone]
            del dropped
        return stay

    def close(self) -> None:
        """Ends all, without a word to anybody."""
        with self._lock:
            self._closed = True
            contexts = list(self.table.values())
            self.table.clear()
            self.late.clear()
        self.left_open += sum(context.id >> ID_BITS == self.me for context in contexts)
        for context in contexts:
            context.asked = {}
            self._leave(context, "this worker shuts down")

    def detach_after_fork(self) -> None:
        """In a forked child: locks may be held by threads that are not there."""
        self._closed = True
        self._lock = threading.Lock()
        self.table, self.late = {}, {}

    # ---- messages

    def carry(self, context: Context, peer: int, tensors: Sequence[Tensor], request: bool) -> int | None:
        """A message made in a context is about to leave; see `AutogradHooks`."""
        message = next(self._message_ids) if tensors else 0
        record = sent(message, peer, tensors) if tensors else None
        with context.lock:
            if context.ended:
                return None
            if record is not None:
                context.sends[message] = record
            if request and peer != self.me:
                context.asked[peer] = context.asked.get(peer, 0) + 1
        return message

    def rollback(self, context: Context, message: int, peer: int) -> None:
        """A request made in a context did not leave."""
        with context.lock:
            record = context.sends.pop(message, None)
            requests = context.asked.pop(peer, 0) - 1
            if requests > 0:
                context.asked[peer] = requests
        del record

    def receive(self, context: Context, peer: int, message: int, tensors: list[Tensor]) -> Sequence[Any]:
        """Records tensors that have come, made without requiring grad."""
        record, made = received(message, peer, tensors)
        with context.lock:
            if not context.ended:
                context.receipts[message] = record
        return made
