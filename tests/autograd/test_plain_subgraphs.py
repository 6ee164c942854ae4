"""Passes without a context walk what they need, and compute the same gradients."""

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_programs import Program, RunResult, Transfer, compare
from simulated_group import Group
from torch import Tensor

from telegrad.autograd.context import Sent
from telegrad.autograd.execution import torch_engine
from telegrad.autograd.graph.local_graph import LocalGraph
from telegrad.autograd.passes.backward_pass import BackwardPass
from telegrad.autograd.plain.records import PlainContext
from telegrad.protocols.backward import UnknownSend

CHUNK = 20


class Losses:
    """Several passes over the graph of one program."""

    def __init__(self, seed: int, program: Program, transfer: Transfer) -> None:
        self.values: list[list[Tensor]] = [[] for _ in range(program.workers)]

        def recording(src: int, dst: int, tensors: Any) -> list[Tensor]:
            received = transfer(src, dst, tensors)
            self.values[dst] += [tensor for tensor in received if tensor.requires_grad]
            self.values[src] += [tensor for tensor in tensors if tensor.requires_grad]
            return received

        root, roots, self.leaves, self.fired = program.run(recording)
        rng = random.Random(f"losses {seed}")
        self.losses = [(root, roots)] if roots else []
        for _ in range(rng.randint(0, 4)):
            worker = rng.randrange(program.workers)
            here = self.values[worker]
            if here:
                picked = rng.sample(here, min(len(here), rng.randint(1, 3)))
                self.losses.append((worker, [tensor.sum() for tensor in picked]))

    def result(self) -> RunResult:
        return RunResult({name: leaf.grad for name, leaf in self.leaves.items()}, self.fired)


def agree(seed: int) -> Group:
    """Compare several passes that share nodes with one process."""
    program = Program(seed)
    alone = Losses(seed, program, lambda src, dst, tensors: [t.clone() for t in tensors])
    for _, roots in alone.losses:
        torch.autograd.backward(roots, retain_graph=True)
    group = Group(program.workers, seed, plain=True)
    apart = Losses(seed, program, group.transfer)
    for worker, roots in apart.losses:
        group.backward(worker, roots, retain_graph=True)
    compare(program, alone.result(), apart.result())
    return group


@pytest.fixture(params=["", "through torch's wrapper"])
def wrapped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine calls of a machine without devices, and those of one with devices."""
    if request.param:
        monkeypatch.setattr(torch_engine, "_can_skip_wrapper", False)


@pytest.mark.usefixtures("wrapped")
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(CHUNK, 120, CHUNK))]
)
def test_random_programs(first: int) -> None:
    for seed in range(first, first + CHUNK):
        group = agree(seed)
        group.passes.clear()
        group.collect()
        assert all(context.is_empty for context in group.contexts), f"seed {seed}"


def test_passes_of_several_programs_at_once() -> None:
    for seed in range(40):
        programs = [Program(1000 + 3 * seed + number) for number in range(3)]
        size = max(program.workers for program in programs)
        group = Group(size, seed, plain=True)
        both = []
        for number, program in enumerate(programs):
            alone = Losses(seed + number, program, lambda src, dst, tensors: [t.clone() for t in tensors])
            both.append((program, alone, Losses(seed + number, program, group.transfer)))
        for turn in range(5):
            begun = []
            for _, alone, apart in both:
                if turn < len(alone.losses):
                    torch.autograd.backward(alone.losses[turn][1], retain_graph=True)
                    worker, roots = apart.losses[turn]
                    begun.append(group.begin(worker, roots, retain_graph=True))
            group.settle()
            for number in begun:
                group.result(number)
        for program, alone, apart in both:
            compare(program, alone.result(), apart.result())


# ---- a pass visits only the records that it needs


def leaf() -> Tensor:
    return torch.ones(3, dtype=torch.float64).requires_grad_()


class Workers:
    """Two trainers, 0 and 2, a server 1, and another one, 3."""

    def __init__(self) -> None:
        self.group = Group(4, 0, plain=True)
        self.weight = leaf()

    def call(self, x: Tensor, by: int = 0) -> Tensor:
        (there,) = self.group.transfer(by, 1, [x])
        (back,) = self.group.transfer(1, by, [there * self.weight])
        return back

    def chained_call(self, x: Tensor, by: int = 0) -> Tensor:
        """Return the result of a call by way of the other server."""
        (there,) = self.group.transfer(by, 1, [x])
        (further,) = self.group.transfer(1, 3, [there * self.weight])
        (back,) = self.group.transfer(3, 1, [further * 2])
        (result,) = self.group.transfer(1, by, [back * 2])
        return result


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> Callable[[Group], int]:
    """Return a function that counts how often passes have walked from a record so far."""
    walked = 0
    extend = LocalGraph.extend

    def count(self: LocalGraph, records: list[Sent]) -> None:
        nonlocal walked
        walked += len(records)
        extend(self, records)

    monkeypatch.setattr(LocalGraph, "extend", count)
    return lambda group: walked + sum(context.components.walked for context in group.contexts)


@pytest.mark.parametrize("call", [Workers.call, Workers.chained_call])
def test_a_pass_does_not_visit_the_records_of_other_trainers(
    visits: Callable[[Group], int], call: Callable[..., Tensor]
) -> None:
    def costs(held: int) -> list[int]:
        workers = Workers()
        group = workers.group
        losses = [call(workers, leaf() * 2, by=2).sum() for _ in range(held)]
        found = []
        for _ in range(3):
            before = visits(group)
            group.backward(0, [call(workers, leaf() * 2).sum()])
            found.append(visits(group) - before)
            group.collect()
        assert len(losses) == held
        return found[1:]  # the first pass may walk all, once

    assert costs(0) == costs(100)


@pytest.mark.parametrize("call", [Workers.call, Workers.chained_call])
def test_forwards_then_backwards_visit_each_record_a_few_times(
    visits: Callable[[Group], int], call: Callable[..., Tensor]
) -> None:
    workers, count = Workers(), 100
    losses = [call(workers, leaf() * 2).sum() for _ in range(count)]
    records = sum(len(context.sends) for context in workers.group.contexts)
    while losses:
        workers.group.backward(0, [losses.pop()])
    assert records >= 2 * count
    assert visits(workers.group) <= 3 * records
    assert torch.equal(workers.weight.grad, torch.full((3,), 2.0 * count * (1 if call is Workers.call else 4)).double())


def test_a_chain_of_sends_is_walked_once() -> None:
    """Each message depends on all earlier ones."""
    workers, state = Workers(), leaf()
    context, steps = workers.group.contexts[0], 50
    visited = 0

    def count(*args: Any) -> Any:
        nonlocal visited
        visited += 1
        return visit(*args)

    visit, context.components._visit = context.components._visit, count
    received = []
    for _ in range(steps):
        state = state * 2
        received.append(workers.call(state))
    workers.group.backward(0, [torch.stack(received).sum()])
    assert visited <= 4 * steps


def test_collecting_visits_only_what_was_freed() -> None:
    group = Group(2, 0, plain=True)
    context: PlainContext = group.contexts[0]
    asked: list[int] = []
    context.is_lost = lambda peer: bool(asked.append(peer))
    received = [group.transfer(0, 1, [leaf()]) for _ in range(50)]
    before = len(asked)
    del received[:10]
    group.collect()
    assert len(context.sends) == 40
    assert len(asked) == before  # the sender has nothing to notify


def test_a_message_to_a_lost_worker_is_not_kept() -> None:
    group = Group(2, 0, plain=True)
    context: PlainContext = group.contexts[0]
    context.is_removed = lambda peer: peer == 1
    called: list[None] = []
    context.request_callback = lambda: called.append(None)
    received = group.transfer(0, 1, [leaf()])
    assert called
    context.collect()
    assert not context.sends
    assert received


# ---- which messages a pass waits for


def test_a_hooked_leaf_of_several_trainers_gets_the_sum() -> None:
    workers = Workers()
    sums: list[Any] = []
    workers.weight.register_hook(lambda grad: sums.append(grad.tolist()))
    losses = [workers.call(leaf(), by=by) for by in (0, 0, 2)]
    workers.group.backward(0, [losses[0].sum() + losses[1].sum()])
    assert sums == [[2, 2, 2]]
    workers.group.backward(2, [losses[2].sum()])
    assert sums[1:] == [[1, 1, 1]]


def test_a_subgraph_that_grows_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaf with hooks connects messages that share no nodes."""
    workers, walked, extend = Workers(), [], LocalGraph.extend

    def note(self: LocalGraph, records: list[Sent]) -> None:
        walked.extend(record.id for record in records)
        extend(self, records)

    monkeypatch.setattr(LocalGraph, "extend", note)
    sums: list[Any] = []
    workers.weight.register_hook(lambda grad: sums.append(grad.tolist()))
    workers.group.backward(0, [workers.call(leaf()).sum() + workers.call(leaf()).sum()])
    assert sums == [[2, 2, 2]]
    assert len(walked) == len(set(walked)) == 4


def test_messages_stay_apart_when_the_one_that_connected_them_is_gone() -> None:
    group = Group(2, 0, plain=True)
    components = group.contexts[0].components
    shared = [leaf() * number for number in range(30)]
    chained = [group.transfer(0, 1, [one + other]) for one, other in zip(2 * shared, shared[1:] * 2, strict=False)]
    own = [group.transfer(0, 1, [one * 2]) for one in shared]
    (first, *_) = sorted(group.contexts[0].sends)
    assert len(components.of(first)) == len(chained) + len(own)
    last = max(group.contexts[0].sends)
    del chained
    group.collect()
    assert components.of(last) == [last]


def test_components_keep_no_graph_alive() -> None:
    group = Group(2, 0, plain=True)
    context: PlainContext = group.contexts[0]
    x, kept = leaf(), leaf() * 2
    h = x * 3
    freed = weakref.ref(x)
    received = group.transfer(0, 1, [h + kept]), group.transfer(0, 1, [kept * 2])
    assert len(context.components.of(max(context.sends))) == 2
    received = received[1:]
    del x, h
    group.collect()
    gc.collect()
    assert freed() is None
    assert len(context.sends) == len(received) == 1


def test_a_deep_graph_that_is_walked_in_small_steps_is_freed_in_steps() -> None:
    """Torch frees a chain of nodes that Python has seen recursively (`deep_graph.py`)."""
    group, state = Group(2, 0, plain=True), leaf()
    for _ in range(40):
        for _ in range(50):
            state = state * 1.0
        group.transfer(0, 1, [state])
        group.contexts[0].components.of(0)  # walks what is new
    node, holding = state.grad_fn, 0
    for _ in range(2000):
        assert node is not None
        holding += "telegrad" in node.metadata
        (node, _), *_ = node.next_functions
    assert 10 < holding < 100


def test_a_message_sent_during_the_pass_is_an_error() -> None:
    workers = Workers()
    group, x = workers.group, leaf()
    h = x * 2
    number = group.begin(0, [workers.call(h).sum() + h.sum()])
    later = group.transfer(0, 1, [h * 2])
    record = max(group.contexts[0].sends)
    part: BackwardPass = group.passes[0, number]
    with pytest.raises(UnknownSend, match="shares nodes with messages of the same backward pass"):
        part._stages.open(sends=(record,))
    group.settle()
    group.result(number)
    assert len(later) == 1
