"""The fast path of a pass sends the schedule's messages, and falls back to it."""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_programs import Program, compare, distributed, local
from simulated_group import Group
from test_fuzz import Oops
from torch import Tensor

import telegrad
from telegrad import autograd, rpc
from telegrad.autograd import ddp
from telegrad.autograd.graph.local_graph import LocalGraph
from telegrad.autograd.passes.backward_pass import BackwardPass
from telegrad.errors import RemoteError, WorkerLost
from telegrad.testing import cluster
from telegrad.worker.scope import outside_contexts

SEEDS = 500
MOST_FUNCTIONS = 51  # on both workers

# Of a forward and a backward pass over one remote call, as measured: a function more on either side is a decision.
MOST_AT_CALLER = 70  # 11 to enter and 6 to leave the context, 10 of the call, 43 of the backward pass
MOST_AT_CALLEE = 54  # 16 of the call, 35 of the backward pass, and 3 of the calls that begin and end the count
COUNTED_PASSES = 20


def leaf(*shape: int) -> Tensor:
    return torch.rand(*shape or (3,), dtype=torch.float64).requires_grad_()


def called(group: Group, x: Tensor, weight: Tensor, by: int = 0, of: int = 1) -> Tensor:
    """Compute `x * weight` at one worker, called by another."""
    (there,) = group.transfer(by, of, [x])
    (back,) = group.transfer(of, by, [there * weight])
    return back


@pytest.fixture
def steps_taken(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the steps on the fast path, and the fallbacks from it."""
    seen: Counter[str] = Counter()

    def count(name: str, at_root: str, elsewhere: str = "") -> None:
        original: Callable[..., Any] = getattr(BackwardPass, name)

        def counting(self: BackwardPass, *args: Any) -> Any:
            is_new = self._schedule is None and (name != "_materialize_schedule" or self._fast_source is not None)
            result = original(self, *args)
            if result and is_new:
                seen[at_root if self._root == self._worker.id else elsewhere] += 1
            return result

        monkeypatch.setattr(BackwardPass, name, counting)

    count("_run_fast", "begun", "answered")
    count("_finish_fast", "finished")
    count("_materialize_schedule", "root catches up", "other catches up")
    return seen


def messages_of(program: Program, network: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the messages of a program's passes, in the order of sending."""
    said: list[str] = []
    original = Group.pass_of

    def pass_of(self: Group, worker: int, number: int, root: int) -> Any:
        self.on_send = lambda src, dst, message: said.append(f"{src} to {dst}: {message}")
        return original(self, worker, number, root)

    with monkeypatch.context() as patch:
        patch.setattr(Group, "pass_of", pass_of)
        compare(program, local(program), distributed(program, network)[0])
    return said


def test_its_messages_are_those_of_the_schedule(monkeypatch: pytest.MonkeyPatch, steps_taken: Counter[str]) -> None:
    for seed in range(SEEDS):
        size = 3 + seed % 6
        found = messages_of(Program(seed, size), seed, monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(LocalGraph, "single_peer", lambda *_: None)
            patch.setattr(LocalGraph, "leads_back", lambda *_: False)
            expected = messages_of(Program(seed, size), seed, monkeypatch)
        assert found == expected, f"seed {seed}"
    assert min(steps_taken[what] for what in ("begun", "answered", "finished", "root catches up")) >= 5, steps_taken


# ---- fallbacks


def test_a_pass_over_a_call_takes_it(steps_taken: Counter[str]) -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    group.backward(0, [called(group, x, w).sum()])
    assert steps_taken == {"begun": 1, "answered": 1, "finished": 1}
    assert torch.equal(group.contexts[0].gradients[x], w)
    assert torch.equal(group.contexts[1].gradients[w], x)
    assert all(not part.holds_graph and part.is_idle for part in group.passes.values())


def test_number_of_python_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small pass spends most of its time in cold code."""
    monkeypatch.setattr(ddp, "_used_ddp", [])  # an earlier test in this process may have created a replica
    group, x, w = Group(2, 0), leaf(), leaf()
    loss = called(group, x, w).sum()
    group.backward(0, [loss], retain_graph=True)  # one-time work is done
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "/telegrad/autograd/" in frame.f_code.co_filename:
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        group.backward(0, [loss])
    finally:
        sys.setprofile(None)
    assert len(entered) <= MOST_FUNCTIONS, entered


WEIGHT = torch.ones(2, requires_grad=True)
entered_at_callee: list[str] = []  # since `begin_count`
counted_at_callee: list[str] = []


def weighted(x: Tensor) -> Tensor:
    return x * WEIGHT


def begin_count() -> None:
    entered_at_callee.clear()


def end_count() -> None:
    counted_at_callee[:] = entered_at_callee


def test_number_of_python_functions_over_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count those of the forward and the backward pass on the threads of both workers."""
    monkeypatch.setattr(ddp, "_used_ddp", [])  # an earlier test in this process may have created a replica
    package, caller = str(Path(telegrad.__file__).parent), threading.get_ident()
    entered_at_caller: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            entered = entered_at_caller if threading.get_ident() == caller else entered_at_callee
            entered.append(frame.f_code.co_qualname)

    def count() -> tuple[list[str], list[str]]:
        """Return the functions of a pass, at the caller and at the callee.

        One thread of the callee serves one request after the other.
        """
        x = torch.ones(2, requires_grad=True)
        rpc.rpc_sync("w1", begin_count)
        entered_at_caller.clear()
        sys.setprofile(note)
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("w1", weighted, (x,)).sum()])
            sys.setprofile(None)
            with outside_contexts():
                rpc.rpc_sync("w1", end_count)  # the end of the context is not counted
            sys.setprofile(note)
        sys.setprofile(None)
        return list(entered_at_caller), list(counted_at_callee)

    threading.setprofile(note)
    try:
        with cluster(2, rpc.Options(num_worker_threads=1)):
            count()  # one-time work is done
            passes = [count() for _ in range(COUNTED_PASSES)]
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(None)
    # The fewest: timers and the garbage collector add functions to some passes.
    at_caller, at_callee = (min(lists, key=len) for lists in zip(*passes, strict=True))
    assert len(at_caller) <= MOST_AT_CALLER, at_caller
    assert len(at_callee) <= MOST_AT_CALLEE, at_callee


def chain(y: Tensor, nodes: int) -> Tensor:
    for _ in range(nodes):
        y = y * 1.0
    return y


def test_large_graphs_take_it_too(steps_taken: Counter[str]) -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    y = chain(called(group, x, w), 2000)
    group.backward(0, [y.sum()])
    assert torch.equal(group.contexts[0].gradients[x], w)
    assert steps_taken == {"begun": 1, "answered": 1, "finished": 1}
    node, held = y.grad_fn, 0
    for _ in range(2000):
        assert node is not None
        held += (
            "telegrad" in node.metadata
        )  # its successors, so that the graph is freed step by step (see deep_graph.py)
        (node, _), *_ = node.next_functions
    assert 10 < held < 100


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[LocalGraph]:
    """Record the graphs that are walked."""
    found: list[LocalGraph] = []
    walk = LocalGraph._walk

    def count(self: LocalGraph, *args: Any) -> bool:
        found.append(self)
        return walk(self, *args)

    monkeypatch.setattr(LocalGraph, "_walk", count)
    return found


def test_graphs_are_walked_once_on_either_path(steps_taken: Counter[str], walks: list[LocalGraph]) -> None:
    group, x, y, w = Group(3, 0), leaf(), leaf(), leaf()
    (there,) = group.transfer(0, 1, [x])
    (further,) = group.transfer(0, 2, [y])
    (across,) = group.transfer(2, 1, [further * w])
    (back,) = group.transfer(1, 0, [there * across])
    group.backward(0, [back.sum()])
    assert steps_taken["begun"] == steps_taken["root catches up"] == 1
    assert len(walks) == 3
    twice = x * 2
    group = Group(2, 0)
    there, again = group.transfer(0, 1, [twice])[0], group.transfer(0, 1, [twice * 2])[0]  # both paths meet at one node
    (back,) = group.transfer(1, 0, [there * w + again * w])
    group.backward(0, [back.sum()])
    assert steps_taken["begun"] == 1
    assert len(walks) == 3 + 2
    assert torch.allclose(group.contexts[0].gradients[x], 6 * w)


def test_after_a_failed_pass_later_ones_take_it(steps_taken: Counter[str]) -> None:
    group, x, w = Group(2, 0), leaf(), leaf()

    def fail(_: Tensor) -> None:
        raise Oops

    hook = x.register_hook(fail)
    back = called(group, x, w)
    for failure, at in ((Oops, x), (RemoteError, w)):
        hook.remove()
        hook = at.register_hook(fail)
        with pytest.raises(failure):
            group.backward(0, [back.sum()], retain_graph=True)
    hook.remove()
    assert steps_taken["root catches up"] == 2
    group.backward(0, [back.sum()])
    assert steps_taken["finished"] == 1
    assert torch.equal(group.contexts[0].gradients[x], w)


def test_remote_parameters_take_it(steps_taken: Counter[str]) -> None:
    """No sent tensor requires grad."""
    group, w = Group(2, 0), leaf()
    (back,) = group.transfer(1, 0, [w * 2])
    assert group.backward(0, [back.sum()]) == 2
    assert steps_taken == {"begun": 1, "answered": 1, "finished": 1}
    assert torch.equal(group.contexts[1].gradients[w], torch.full_like(w, 2))


def test_a_gradient_of_a_third_worker_needs_the_schedule(steps_taken: Counter[str]) -> None:
    group, x, y = Group(3, 0), leaf(), leaf()
    (there,) = group.transfer(0, 1, [x])
    (further,) = group.transfer(1, 2, [there * 2])
    (mine,) = group.transfer(0, 2, [y * 3])
    (near,) = group.transfer(2, 1, [further * mine])
    (back,) = group.transfer(1, 0, [near])
    group.backward(0, [back.sum()])
    assert steps_taken["begun"] == steps_taken["root catches up"] == 1
    assert torch.allclose(group.contexts[0].gradients[x], 6 * y)
    assert torch.allclose(group.contexts[0].gradients[y], 6 * x)


def test_a_root_with_more_to_send_needs_the_schedule(steps_taken: Counter[str]) -> None:
    """A sent tensor depends on a tensor received from a third worker."""
    group, y, w = Group(3, 0), leaf(), leaf()
    (h,) = group.transfer(2, 0, [y * 2])
    (there,) = group.transfer(0, 1, [h * 2])
    (back,) = group.transfer(1, 0, [there * w])
    group.backward(0, [back.sum()])
    assert steps_taken == {"answered": 2}
    assert torch.equal(group.contexts[2].gradients[y], 4 * w)
    assert torch.equal(group.contexts[1].gradients[w], 4 * y)


def test_marks_pass_a_worker_that_has_replied(steps_taken: Counter[str]) -> None:
    group, y, w = Group(3, 0), leaf(), leaf()
    (h,) = group.transfer(2, 0, [y * 2])
    (there,) = group.transfer(0, 1, [h * 2])
    group.transfer(0, 2, [h * 3])  # the loss does not use it, so h waits for the end of the mark phase
    (back,) = group.transfer(1, 0, [there * w])
    group.backward(0, [back.sum()])
    assert steps_taken["answered"] == 1
    assert steps_taken["other catches up"] == 1
    assert group.passes[1, 1].is_idle
    assert torch.equal(group.contexts[2].gradients[y], 4 * w)


def test_a_failing_hook_at_the_root_fails_the_pass(steps_taken: Counter[str]) -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    back = called(group, x, w)
    again = back * 2

    def fail(_: Tensor) -> None:
        raise Oops

    again.register_hook(fail)
    with pytest.raises(Oops):
        group.backward(0, [again.sum()])
    assert not group.net
    group.backward(0, [back.sum()])
    assert steps_taken == {"begun": 1, "answered": 1, "finished": 1}
    assert torch.equal(group.contexts[0].gradients[x], w)


@pytest.mark.parametrize("where", ["there", "back"])
def test_a_failing_hook_on_another_worker_fails_the_pass(where: str) -> None:
    group, x, w = Group(2, 0), leaf(), leaf()

    def fail(_: Tensor) -> None:
        raise Oops("on the way")

    (w if where == "there" else x).register_hook(fail)
    with pytest.raises(RemoteError if where == "there" else Oops, match="on the way"):
        group.backward(0, [called(group, x, w).sum()])
    assert all(part.is_over and not part.holds_graph for part in group.passes.values())


@pytest.mark.parametrize("hooked", [False, True])
def test_a_leaf_that_no_longer_requires_grad_gets_none(steps_taken: Counter[str], hooked: bool) -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    if hooked:
        x.register_hook(lambda gradient: gradient * 2)
    back = called(group, x, w)
    x.requires_grad_(False)
    group.backward(0, [back.sum()])
    assert not group.contexts[0].gradients
    assert torch.equal(group.contexts[1].gradients[w], x)
    assert steps_taken == {"begun": 1, "answered": 1, "finished": 1}


@pytest.mark.parametrize("delivered", [0, 1])
def test_a_lost_worker_fails_the_pass(delivered: int) -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    number = group.begin(0, [called(group, x, w).sum()])
    for _ in range(delivered):
        group.deliver()
    group.kill(1)
    group.report_loss(0, 1)
    with pytest.raises(WorkerLost):
        group.result(number)
    assert not group.passes[0, number].holds_graph


def test_no_worker_waits_for_a_lost_root(steps_taken: Counter[str]) -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    group.begin(0, [called(group, x, w).sum()])
    group.deliver()
    group.kill(0)
    group.report_loss(1, 0)
    assert steps_taken["other catches up"] == 1
    assert group.passes[1, 1].is_over
    assert not group.passes[1, 1].holds_graph


def test_a_second_gradient_for_one_message_fails_the_pass(steps_taken: Counter[str]) -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    number = group.begin(0, [called(group, x, w).sum()])
    _, src, dst, message = group.net[0]
    group.net.append((number, src, dst, (*message[:4], [t.clone() for t in message[4]], None)))
    group.settle()
    with pytest.raises(RemoteError, match="already received all its gradients"):
        group.result(number)
    assert steps_taken["other catches up"] == 1


def test_the_root_reports_what_it_waits_for() -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    number = group.begin(0, [called(group, x, w).sum()])
    assert group.passes[0, number].describe_pending() == "worker w1: 1 x gradients"
    group.settle()
    assert group.passes[0, number].describe_pending() == "nothing"


def test_leaves_with_hooks_of_either_kind() -> None:
    """Leaves are sent without an operation."""
    group, w = Group(2, 0), leaf()
    x, y = leaf(), leaf()
    seen: list[str] = []

    def note(gradient: Tensor) -> Tensor:
        seen.append("tensor")
        return gradient * 2

    x.register_hook(note)
    y.register_post_accumulate_grad_hook(lambda leaf: seen.append("leaf"))
    there = group.transfer(0, 1, [x, y])
    (back,) = group.transfer(1, 0, [there[0] * w + there[1]])
    group.backward(0, [back.sum()])
    assert seen == ["tensor", "leaf"]
    assert torch.equal(group.contexts[0].gradients[x], 2 * w)
    assert torch.equal(group.contexts[0].gradients[y], torch.ones_like(y))
    assert x.grad is y.grad is None
