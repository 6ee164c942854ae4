"""Simulated workers that run real passes over a network with random order.

`Group` performs a worker's part around `BackwardPass`, so that passes run without workers: tensors are copied from
worker to worker, messages wait in one list, and `deliver` takes them in random order.
If no message is left and `backward` has not returned, the pass hangs, which raises `Hang`.
"""

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from telegrad.autograd import recording
from telegrad.autograd.context import Context
from telegrad.autograd.passes.backward_pass import BackwardPass
from telegrad.autograd.plain.records import PlainContext
from telegrad.types import WorkerInfo

ENCODABLE = (int, bytes, str, bool, type(None))


class Hang(AssertionError):
    """No message is in flight, but `backward` waits."""


def check_encodable(message: Any, depth: int = 0) -> None:
    """Check that the codec can encode a message, with tensors only in lists."""
    if type(message) is tuple:
        for item in message:
            check_encodable(item, depth + 1)
    elif type(message) is list:
        assert all(t is None or type(t) is Tensor for t in message), message
    else:
        assert type(message) in ENCODABLE, f"{type(message)} in a message"


class Group:
    """Workers with one common context.

    `plain`: with a plain context each.
    """

    def __init__(self, size: int, seed: int, plain: bool = False) -> None:
        self.size = size
        self.rng = random.Random(f"network {seed}")
        self.contexts: list[Any] = [PlainContext(worker) if plain else Context(id=7) for worker in range(size)]
        self.passes: dict[tuple[int, int], BackwardPass] = {}  # (worker, number)
        self.net: list[tuple[int, int, int, Any]] = []  # (number, from, to, message)
        self.sent = [0] * size
        self.numbers = 0
        self.dead: set[int] = set()
        self.results: dict[int, list[BaseException | None]] = {}
        self.delivered = 0
        self.copies = True  # messages are
        self.on_send: Callable[[int, int, Any], None] = lambda src, dst, message: None

    # ---- the forward pass --------------------------------------------------------------------------------------------

    def transfer(self, src: int, dst: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send tensors in one message and return the received ones."""
        copies = [tensor.detach().clone() for tensor in tensors]
        wanted = [number for number, tensor in enumerate(tensors) if tensor.requires_grad]
        if wanted:
            self.sent[src] += 1
            message = src << 48 | self.sent[src]
            sent = recording.record_sent(message, dst, [tensors[n] for n in wanted])
            self.contexts[src].sends[message] = sent
            received = [copies[n] for n in wanted]
            if isinstance(self.contexts[src], PlainContext):
                self.contexts[src].on_sent(sent)
                made = self.contexts[dst].receipt(src, message)(received)
            else:
                record, made = recording.record_received(message, src, received)
                self.contexts[dst].receipts[message] = record
            for number, tensor in zip(wanted, made, strict=True):
                copies[number] = tensor
        return copies

    def collect(self) -> None:
        """Drop the records of messages whose tensors have been freed, in plain contexts."""
        freed = True
        while freed:
            gc.collect()
            freed = False
            for context in self.contexts:
                before = len(context.receipts)
                for peer, messages in context.collect().items():
                    self.contexts[peer].release(messages)
                freed |= len(context.receipts) < before

    # ---- the backward pass -------------------------------------------------------------------------------------------

    def pass_of(self, worker: int, number: int, root: int) -> BackwardPass:
        made = self.passes.get((worker, number))
        if made is None:

            def send(item: tuple[int, tuple[Any, ...]]) -> None:
                to, message = item
                assert to != worker, "messages to oneself stay inside"
                assert to not in self.dead or worker in self.dead or not self.has_noticed(worker, to), "dead peer"
                check_encodable(message)
                self.on_send(worker, to, message)
                if to not in self.dead:
                    self.net.append((number, worker, to, copied(message) if self.copies else message))

            made = self.passes[worker, number] = BackwardPass(
                WorkerInfo(f"w{worker}", worker),
                self.contexts[worker],
                number,
                root,
                send,
                lambda error: self.results.setdefault(number, []).append(error),
                lambda peer: f"w{peer}",
            )
        return made

    def has_noticed(self, worker: int, dead: int) -> bool:
        return (worker, dead) in self._noticed

    _noticed: set[tuple[int, int]] = set()

    def begin(self, root: int, roots: Sequence[Tensor], retain_graph: bool = False) -> int:
        self.numbers += 1
        number = self.numbers
        self.roots = {**getattr(self, "roots", {}), number: root}
        self.pass_of(root, number, root).start(roots, retain_graph)
        return number

    def backward(self, root: int, roots: Sequence[Tensor], retain_graph: bool = False) -> int:
        """Run a pass and return its number of messages; raise its error, or `Hang`."""
        before = self.delivered
        number = self.begin(root, roots, retain_graph)
        self.settle()
        self.result(number)
        return self.delivered - before

    def result(self, number: int) -> None:
        results = self.results.get(number, [])
        if not results:
            raise Hang(self.passes[self.roots[number], number].describe_pending())
        assert len(results) == 1, "finished twice"
        if results[0] is not None:
            raise results[0]

    def settle(self, watch: Callable[[], None] = lambda: None) -> None:
        """Deliver messages in random order until none is left."""
        while self.net:
            self.deliver()
            watch()

    def deliver(self) -> None:
        place = self.rng.randrange(len(self.net))
        number, src, dst, message = self.net.pop(place)
        self.delivered += 1
        self.pass_of(dst, number, self.roots[number]).on_message(src, message)

    def kill(self, worker: int) -> None:
        self.dead.add(worker)
        self.net = [packet for packet in self.net if packet[2] != worker]

    def report_loss(self, worker: int, dead: int) -> None:
        self._noticed = {*self._noticed, (worker, dead)}
        self.net = [packet for packet in self.net if packet[1:3] != (dead, worker)]
        for (owner, _), made in list(self.passes.items()):
            if owner == worker:
                made.peer_lost(dead, "its process died")


def copied(message: Any) -> Any:
    """Copy a message like a network: no tensor shares memory."""
    if type(message) is tuple:
        return tuple(copied(item) for item in message)
    if type(message) is list:
        return [None if t is None else t.detach().clone() for t in message]
    return message
