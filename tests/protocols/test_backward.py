"""Schedule of a backward pass: delivery orders, random programs, deaths, errors."""

import itertools
import random

import pytest
from backward_world import Counterexample, Program, Sent, World, explore, random_program, wander

from telegrad.protocols import backward, backward_root
from telegrad.protocols.backward import PassSchedule
from telegrad.protocols.backward_messages import Gradients, Report

# One call: 0 sends an argument, 1 sends the reply that used it.
CALL = (Sent(0, 1, leaf=True), Sent(1, 0, uses=(0,), leaf=True))

SMALL = {
    "nothing sent": Program(1, (), 0, ()),
    "one call": Program(2, CALL, 0, (1,)),
    "an unused reply": Program(2, CALL, 0, (), leaf=True),
    "two replies, one unused": Program(2, (*CALL, Sent(0, 1), Sent(1, 0, uses=(2, 0), leaf=True)), 0, (1,)),
    "two values, one unused": Program(2, (Sent(1, 0, leaf=True), Sent(1, 0, leaf=True)), 0, (0,)),
    "two ways to one": Program(3, (Sent(1, 2), Sent(1, 0, leaf=True), Sent(1, 0), Sent(2, 0, (0,))), 0, (1, 3)),
    "blocked by an unused send": Program(3, (Sent(0, 1), Sent(1, 0, uses=(0,)), Sent(1, 2, uses=(0,))), 0, (1,)),
    "diamond": Program(
        3, (Sent(0, 1, leaf=True), Sent(0, 2), Sent(1, 0, (0,)), Sent(2, 0, (1,))), 0, (2, 3), leaf=True
    ),
    "one value to two": Program(
        3, (Sent(1, 0, leaf=True), Sent(1, 2), Sent(0, 2, (0,)), Sent(2, 0, (1, 2))), 0, (3, 0)
    ),
    "round trips": Program(2, (Sent(0, 1), Sent(1, 0, (0,)), Sent(0, 1, (1,)), Sent(1, 0, (2, 0))), 0, (3, 1)),
    "to itself": Program(2, (Sent(0, 0, leaf=True), Sent(0, 1, (0,)), Sent(1, 0, (1,)), Sent(0, 0, (2,))), 0, (3, 0)),
    "a chain of three": Program(3, (Sent(0, 1), Sent(1, 2, (0,)), Sent(2, 1, (1,)), Sent(1, 0, (2,), True)), 0, (3,)),
    "unused all along": Program(
        3, (Sent(0, 1), Sent(1, 2, (0,)), Sent(2, 1, (1,)), Sent(1, 0, (0,)), Sent(1, 0, (0, 2), True)), 0, (3,)
    ),
}


# Worker 1 sends a value to the root, and another one to two workers.
LATER_SUBGRAPH = Program(
    4,
    (Sent(2, 1), Sent(1, 0, leaf=True), Sent(1, 2, (0,)), Sent(1, 3, (0,)), Sent(2, 0, (2,)), Sent(3, 0, (3,))),
    0,
    (1, 4, 5),
    subgraphs=True,
)
# Worker 1 sends two values, each twice: one to the root, the other to a worker that sends it on.
TWO_SUBGRAPHS = Program(
    3,
    (
        *(Sent(2, 1), Sent(1, 0, (0,), leaf=True), Sent(1, 0, (0,), leaf=True)),
        *(Sent(2, 1), Sent(1, 2, (3,), leaf=True), Sent(1, 2, (3,), leaf=True), Sent(2, 0, (4, 5))),
    ),
    0,
    (1, 2, 6),
    subgraphs=True,
)


@pytest.mark.parametrize("subgraphs", [False, True], ids=["whole", "in subgraphs"])
@pytest.mark.parametrize("name", SMALL)
def test_every_order_of_delivery(name: str, subgraphs: bool) -> None:
    assert explore(SMALL[name]._replace(subgraphs=subgraphs)) >= 2


def test_a_subgraph_may_be_found_after_another_has_run() -> None:
    assert explore(TWO_SUBGRAPHS) > 100


@pytest.mark.parametrize("subgraphs", [False, True], ids=["whole", "in subgraphs"])
@pytest.mark.parametrize("name", SMALL)
def test_every_death_at_every_moment(name: str, subgraphs: bool) -> None:
    program = SMALL[name]._replace(subgraphs=subgraphs)
    if program.workers > 1:
        assert explore(program._replace(mortal=tuple(range(program.workers)))) > 5


@pytest.mark.parametrize("stage", [-1, 0, 1])
@pytest.mark.parametrize("name", SMALL)
def test_every_failing_stage(name: str, stage: int) -> None:
    program = SMALL[name]
    for worker in range(program.workers):
        explore(program._replace(failing=((worker, stage),)))


# Workers 1 to 3 pass a value on; the root has a link with worker 1 only.
CHAIN_OF_FOUR = Program(
    4, (Sent(0, 1), Sent(1, 2, (0,)), Sent(2, 3, (1,)), Sent(3, 2, (2,)), Sent(2, 1, (3,)), Sent(1, 0, (4,))), 0, (5,)
)
WALLS = {
    "to the root": ((2, 0), (3, 0)),
    "from the root": ((0, 2), (0, 3)),
    "one worker": ((0, 3), (3, 0)),
    "both ways": ((2, 0), (3, 0), (0, 2), (0, 3)),
}


@pytest.mark.parametrize("walls", WALLS.values(), ids=WALLS)
@pytest.mark.parametrize(
    "name",
    [
        *(name for name, program in SMALL.items() if program.workers > 2),
        pytest.param("four", marks=pytest.mark.slow),
    ],
)
def test_workers_that_cannot_reach_the_root(name: str, walls: tuple[tuple[int, int], ...]) -> None:
    program = CHAIN_OF_FOUR if name == "four" else SMALL[name]
    assert explore(program._replace(walls=walls)) > 3
    if program.workers == 3:
        explore(program._replace(walls=walls, mortal=(0, 1, 2)))


@pytest.mark.parametrize("losses", [False, True], ids=["all live", "deaths"])
def test_random_programs_and_walls(losses: bool) -> None:
    for seed in range(300):
        rng = random.Random(f"walls {seed}")
        program = random_program(seed, losses, failures=seed % 3 == 0)
        pairs = itertools.permutations(range(program.workers), 2)
        walls = tuple(pair for pair in pairs if rng.random() < 0.5)
        wander(program._replace(walls=walls, subgraphs=seed % 2 == 0, cuts=seed % 2), seed)


@pytest.mark.parametrize("losses", [False, True], ids=["all live", "deaths"])
@pytest.mark.parametrize("failures", [False, True], ids=["no errors", "errors"])
@pytest.mark.parametrize("subgraphs", [False, True], ids=["whole", "in subgraphs"])
def test_random_programs(losses: bool, failures: bool, subgraphs: bool) -> None:
    programs = [random_program(seed, losses, failures)._replace(subgraphs=subgraphs) for seed in range(300)]
    assert sum(wander(program, seed) for seed, program in enumerate(programs)) > 1000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("losses", [False, True], ids=["all live", "deaths"])
@pytest.mark.parametrize("failures", [False, True], ids=["no errors", "errors"])
def test_thousands_of_random_programs(losses: bool, failures: bool) -> None:
    for seed in range(1000, 21000):
        wander(random_program(seed, losses, failures)._replace(subgraphs=seed % 2 == 0), seed)


def messages_of(program: Program) -> list[str]:
    """Return the messages of a pass with delivery in the order of sending."""
    world = World(program)
    world.do(("start",))
    names = []
    while world.net:
        src, dst, message = world.net[0]
        names.append(f"{src}>{dst} {type(message).__name__}")
        world.deliver(src, dst, message)
    world.settled()
    return names


def test_a_call_takes_two_messages() -> None:
    assert messages_of(SMALL["one call"]) == ["0>1 Gradients", "1>0 Gradients"]


def test_a_diamond_needs_no_mark_phase_and_no_finish() -> None:
    names = messages_of(SMALL["diamond"])
    assert sorted(names) == ["0>1 Gradients", "0>2 Gradients", "1>0 Gradients", "2>0 Gradients"]


def test_only_blocked_groups_cost_a_mark_phase() -> None:
    names = messages_of(SMALL["blocked by an unused send"])
    assert {"1>0 Report", "0>1 Marked"} <= set(names)
    assert not any(name.startswith("2>") or ">2" in name for name in names), "worker 2 does not take part"


def test_the_ledger_has_the_outstanding_tokens() -> None:
    world = World(SMALL["a chain of three"])
    world.do(("start",))
    ledger = world.parts[0].ledger
    assert ledger is not None
    assert {ledger.where[token] for token in ledger.outstanding} == {1}


def test_an_unknown_send_is_an_error() -> None:
    world = World(SMALL["one call"])
    with pytest.raises(backward.UnknownSend, match="message 7"):
        world.parts[1].handle(0, Gradients((7,), False))


# ---- each rule is needed: without it the explorer finds a counterexample ---------------------------------------------


def deaf_to_marks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PassSchedule, "_end_mark_phase", lambda self: None)


def runs_too_early(patch: pytest.MonkeyPatch) -> None:
    update = PassSchedule._update_groups

    def hasty(self, groups):
        self._expected = self._arrived
        update(self, groups)

    patch.setattr(PassSchedule, "_update_groups", hasty)


def reports_consumption_first(patch: pytest.MonkeyPatch) -> None:
    """Report consumed and produced tokens of one event separately."""
    close = PassSchedule._close

    def split(self, effects):
        if self.ledger is None and self._produced:
            first = Report(self._event, tuple(self._consumed), (), self.blocked, self.deferred)
            self._consumed = []
            return [backward.Send(self.root, first), *close(self, effects)]
        return close(self, effects)

    patch.setattr(PassSchedule, "_close", split)


def expects_no_further_subgraph(patch: pytest.MonkeyPatch) -> None:
    """Ignore the sources of a subgraph that was found later."""
    add = PassSchedule._add_sources

    def hasty(self, layout, first, first_group):
        expected = self._expected
        add(self, layout, first, first_group)
        if first:
            self._expected = expected

    patch.setattr(PassSchedule, "_add_sources", hasty)


def runs_the_last_stage_once(patch: pytest.MonkeyPatch) -> None:
    learn = PassSchedule._learn_layout

    def keeping(self, sends=()):
        ran = self._final_ran
        layout = learn(self, sends)
        self._final_ran = ran
        return layout

    patch.setattr(PassSchedule, "_learn_layout", keeping)


def forgets_what_is_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backward_root.Ledger, "deferred", lambda self: set())


def watches_no_worker(patch: pytest.MonkeyPatch) -> None:
    lost = PassSchedule.lost

    def only_the_root(self, peer, why):
        if self.root in (peer, self.me):
            return lost(self, peer, why)
        self._gone[peer] = why
        return ()

    patch.setattr(PassSchedule, "lost", only_the_root)


def notifies_only_workers_it_sent_to(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PassSchedule, "_after_the_end", lambda self, sender, message: ())


def reports_to_no_sender(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PassSchedule, "unreachable", PassSchedule.lost)


def passes_no_error_on_after_the_end(patch: pytest.MonkeyPatch) -> None:
    unreachable = PassSchedule.unreachable

    def only_before(self, peer, why):
        return unreachable(self, peer, why) if self.over is None else self.lost(peer, why)

    patch.setattr(PassSchedule, "unreachable", only_before)


def takes_an_unreachable_worker_for_lost(patch: pytest.MonkeyPatch) -> None:
    unreachable = PassSchedule.unreachable

    def lost_to_the_root(self, peer, why):
        return unreachable(self, peer, why) if self.ledger is None else self.lost(peer, why)

    patch.setattr(PassSchedule, "unreachable", lost_to_the_root)


def believes_old_reports(patch: pytest.MonkeyPatch) -> None:
    enter = backward_root.Ledger.enter

    def latest_to_come(self, worker, report):
        self._states.pop(worker, None)
        enter(self, worker, report)

    patch.setattr(backward_root.Ledger, "enter", latest_to_come)


MORTAL = (0, 1, 2)
MUTANTS = [
    (deaf_to_marks, "blocked", SMALL["blocked by an unused send"]),
    (runs_too_early, "E1", SMALL["one value to two"]),
    (reports_consumption_first, "T1|E2", SMALL["a chain of three"]),
    (forgets_what_is_left, "T1", SMALL["two values, one unused"]),
    (watches_no_worker, "T2", SMALL["a chain of three"]._replace(mortal=MORTAL)),
    (notifies_only_workers_it_sent_to, "T2", SMALL["a chain of three"]._replace(mortal=MORTAL)),
    (reports_to_no_sender, "T2", SMALL["a chain of three"]._replace(walls=((2, 0),))),
    (passes_no_error_on_after_the_end, "T2", CHAIN_OF_FOUR._replace(walls=((2, 0), (3, 0)))),
    (
        takes_an_unreachable_worker_for_lost,
        "T2",
        SMALL["a chain of three"]._replace(walls=WALLS["from the root"], mortal=MORTAL),
    ),
    (believes_old_reports, "T1", SMALL["two ways to one"]),
    (expects_no_further_subgraph, "E1", LATER_SUBGRAPH),
    (runs_the_last_stage_once, "T1", TWO_SUBGRAPHS),
]


@pytest.mark.parametrize(("mutate", "invariant", "program"), MUTANTS, ids=[m[0].__name__ for m in MUTANTS])
def test_each_rule_is_needed(monkeypatch: pytest.MonkeyPatch, mutate, invariant: str, program: Program) -> None:
    mutate(monkeypatch)
    with pytest.raises(Counterexample, match=invariant):
        explore(program)
