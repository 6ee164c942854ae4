"""Orders of calls, timeouts and messages of operations of three workers."""

from collections.abc import Callable
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.errors import TelegradError
from telegrad.rpc.gathering import Gathering, Offer, Operation, OperationId

LEADER, FOLLOWERS = "w0", ("w1", "w2")
NAMES = (LEADER, *FOLLOWERS)


class Run:
    """Call of an operation by one worker."""

    def __init__(self, op: Operation, value: int, begun: int) -> None:
        self.op, self.value, self.begun = op, value, begun
        self.ended: int | None = None
        self.result: dict[str, object] | None = None
        self.offers: dict[str, Offer] = {}  # of a leader that has asked
        self.replies: dict[str, bool] = {}
        self.is_sending = False


class Message(NamedTuple):
    """Message on its way; `about` is the follower and its operation."""

    kind: str
    about: tuple[str, OperationId]
    deliver: Callable[[], None]


class World:
    """Workers that act as `telegrad.rpc.collectives` does, without threads."""

    def __init__(self) -> None:
        self.gatherings = {name: Gathering(name, lambda names: (1,) * len(names)) for name in NAMES}
        self.running: dict[str, Run] = {}
        self.runs: dict[int, Run] = {}  # by value
        self.messages: list[Message] = []
        self.now = 0

    def call(self, name: str) -> None:
        """Begin an operation."""
        op = self.gatherings[name].begin(NAMES, "")
        self.now += 1
        run = self.running[name] = self.runs[self.now] = Run(op, self.now, self.now)
        if name == LEADER:
            self.ask()
        else:
            self.send("offer", (name, op.id), lambda: self.offer(name, op.id, run.value))

    def end(self, name: str) -> None:
        """End the operation of a worker, by its timeout or because it is over."""
        run = self.running.pop(name)
        self.now += 1
        run.ended = self.now
        is_complete = self.gatherings[name].finish(run.op)
        if name != LEADER:
            if is_complete:
                run.result = run.op.gathered_objects
            else:
                self.send("withdrawal", (name, run.op.id), lambda: self.gatherings[LEADER].close({name: run.op.id}))
        elif run.is_sending and run.result is None:
            for each, offer in run.offers.items():
                self.send("failure", (each, offer.id), lambda each=each, offer=offer: self.fail(each, offer.id))  # type: ignore[misc]

    def send(self, kind: str, about: tuple[str, OperationId], deliver: Callable[[], None]) -> None:
        self.messages.append(Message(kind, about, deliver))

    def offer(self, name: str, op_id: OperationId, value: int) -> None:
        self.gatherings[LEADER].collect(str(op_id), name, value, set(NAMES))
        self.ask()

    def ask(self) -> None:
        """Ask the followers, if all have offered."""
        run = self.running.get(LEADER)
        if run is None or run.offers:
            return
        offers = self.gatherings[LEADER].offers(run.op)
        if offers.keys() == set(FOLLOWERS):
            run.offers = offers
            self.send_to_followers(run, "question", lambda name, op_id: self.gatherings[name].confirm(str(op_id)))

    def send_to_followers(self, run: Run, kind: str, handle: Callable[[str, OperationId], bool]) -> None:
        run.replies = {}
        for name, offer in run.offers.items():

            def deliver(name: str = name, op_id: OperationId = offer.id) -> None:
                was_waiting = handle(name, op_id)
                self.end_if_over(name)
                self.send("reply", (name, op_id), lambda: self.reply(run, kind, name, was_waiting))

            self.send(kind, (name, offer.id), deliver)

    def reply(self, run: Run, kind: str, name: str, was_waiting: bool) -> None:
        if self.running.get(LEADER) is not run or run.is_sending != (kind == "values"):
            return
        run.replies[name] = was_waiting
        if run.replies.keys() != set(FOLLOWERS):
            return
        over = {name: run.offers[name].id for name, is_there in run.replies.items() if not is_there}
        if run.is_sending:
            if not over:
                run.result = self.values(run)
            self.end(LEADER)
        elif over:
            self.gatherings[LEADER].close(over)
            run.offers = {}
            self.ask()
        else:
            run.is_sending = True
            self.gatherings[LEADER].close({name: offer.id for name, offer in run.offers.items()})
            values = self.values(run)
            self.send_to_followers(run, "values", lambda name, i: self.gatherings[name].proceed(str(i), values))

    def values(self, run: Run) -> dict[str, object]:
        return {LEADER: run.value, **{name: offer.value for name, offer in run.offers.items()}}

    def fail(self, name: str, op_id: OperationId) -> None:
        self.gatherings[name].fail(str(op_id), TelegradError("failed"))
        self.end_if_over(name)

    def end_if_over(self, name: str) -> None:
        run = self.running.get(name)
        if run is not None and (run.op.gathered_objects or run.op.failure is not None):
            self.end(name)

    def deliver(self, choice: int) -> None:
        self.messages.pop(choice % len(self.messages)).deliver()

    def check(self) -> None:
        """Check each result: the operations with its values ran at the same moment."""
        for run in self.runs.values():
            if run.result is not None:
                together = [self.runs[value] for value in run.result.values()]  # type: ignore[index]
                assert run in together
                assert max(each.begun for each in together) < min(each.ended or self.now + 1 for each in together)


def act(world: World, choice: int) -> None:
    """Have a worker call or give up, or deliver or lose a message."""
    kind, which = choice % 8, choice // 8
    name = NAMES[which % len(NAMES)]
    if kind < 2 and name not in world.running:
        world.call(name)
    elif kind == 2 and name in world.running:
        world.end(name)
    elif world.messages:
        message = world.messages[which % len(world.messages)]
        if kind == 3 and message.kind == "withdrawal":
            world.messages.remove(message)
        else:
            world.deliver(which)


@settings(derandomize=True, deadline=None, max_examples=1500)
@given(st.lists(st.integers(0, 8 * 12 - 1), max_size=60), st.lists(st.integers(0, 11), max_size=40), st.booleans())
def test_one_more_call_on_all_brings_them_together(choices: list[int], late: list[int], all_end: bool) -> None:
    """Try all failures before, and all messages on the way.

    A worker that waits may go on waiting.
    """
    world = World()
    for choice in choices:
        act(world, choice)
    over = {message.about for message in world.messages if message.kind in ("values", "failure")}
    for name in list(world.running):
        if all_end or name == LEADER or (name, world.running[name].op.id) in over:
            world.end(name)
    over = {message.about for message in world.messages if message.kind == "failure"}
    for name in [name for name, run in world.running.items() if (name, run.op.id) in over]:
        world.end(name)
    for name in NAMES:
        if name not in world.running:
            world.call(name)
    last = dict(world.running)
    while world.messages:
        world.deliver(late.pop() if late else 0)
    world.check()
    expected = {name: run.value for name, run in last.items()}
    assert {name: run.result for name, run in last.items()} == dict.fromkeys(NAMES, expected)
    assert world.gatherings[LEADER].open_offers == {}
    assert all(gathering.operations == [] for gathering in world.gatherings.values())
