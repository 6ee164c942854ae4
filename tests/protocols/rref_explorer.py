"""Explorer of a modeled group.

`explore` runs every interleaving, `wander` a random one, and `replay` repeats one.
"""

import random
from collections.abc import Iterable

from rref_invariants import rested, settled, verify
from rref_world import FAULTS, Action, Broken, Scenario, World

from telegrad.protocols.rref import RRefId, RRefProtocolError


class Counterexample(AssertionError):
    """An invariant broke. `replay(scenario, trace)` reproduces it."""

    def __init__(self, broken: Exception, trace: list[Action], title: str) -> None:
        steps = "\n".join(f"    {action!r}," for action in trace)
        super().__init__(f"{broken!r}\n{title}\ntrace = [\n{steps}\n]")
        self.trace = trace


def replay(scenario: Scenario, trace: Iterable[Action]) -> World:
    """Run the trace of a failure and check after every action."""
    world = World(scenario)
    verify(world)
    for action in trace:
        world.do(action)
        verify(world)
    if world.quiet():
        settled(world)
    return world


def explore(scenario: Scenario, guarantees_only: bool = False, limit: int = 1_000_000) -> int:
    """Visit every reachable state; return their number.

    Args:
        scenario: The programs of the workers.
        guarantees_only: Check only the guarantees of the protocol (G1, G2, G3, L1), not its inner invariants.
        limit: Maximum number of states.

    Raises:
        Counterexample: An invariant broke.
    """
    start = World(scenario)
    verify(start)
    origin: dict[int, tuple[int, Action] | None] = {start.fingerprint(): None}
    frontier = [start]
    while frontier:
        world = frontier.pop()
        here = world.fingerprint()
        actions = world.actions()
        last: Action | None = None
        try:
            verbs = {action[0] for action in actions}
            rested(world, verbs)
            if verbs <= FAULTS:
                settled(world)
            for action in actions:
                after = world.copy()
                last = action
                after.do(action)
                mark = after.fingerprint()
                fresh = mark not in origin
                if fresh:
                    origin[mark] = (here, action)
                    frontier.append(after)
                if fresh or after.freed:  # a deletion is checked per step, not only per state
                    verify(after, guarantees_only)
                last = None
        except (Broken, RRefProtocolError, LookupError) as broken:
            trace = path(origin, here) + ([last] if last else [])
            raise Counterexample(broken, trace, f"{scenario}") from broken
        assert len(origin) <= limit, f"more than {limit} states: make the scenario smaller"
    return len(origin)


def path(origin: dict[int, tuple[int, Action] | None], mark: int) -> list[Action]:
    trace = []
    while (step := origin[mark]) is not None:
        mark, action = step
        trace.append(action)
    return trace[::-1]


def wander(scenario: Scenario, seed: int) -> int:
    """Run one random schedule to its end; return its length.

    Raises:
        Counterexample: An invariant broke; the text has the seed.
    """
    rng = random.Random(seed)
    # Each schedule has its own weights, so that some delay deliveries, some collect drops, and in some workers die
    # early.
    taste = {verb: 4.0 ** rng.uniform(-2, 2) for verb in ("deliver", "step", "drop", "flush", "finish", "timeout")}
    taste |= {verb: 4.0 ** rng.uniform(-2, 2) for verb in ("deliver_late", "heal", "lose_call")}
    taste |= {verb: 4.0 ** rng.uniform(-2, 0.5) for verb in ("notice", "join", "skip")}
    taste |= {verb: 4.0 ** rng.uniform(-4, -2) for verb in ("kill", "rejoin", "cut", "split")}
    world = World(scenario)
    trace: list[Action] = []
    try:
        while actions := world.actions():
            verbs = {action[0] for action in actions}
            rested(world, verbs)
            if verbs <= FAULTS:
                settled(world)
                if rng.random() < 0.5:
                    break
            action = rng.choices(actions, [taste[action[0]] for action in actions])[0]
            trace.append(action)
            world.do(action)
            verify(world)
        settled(world)
    except (Broken, RRefProtocolError, LookupError) as broken:
        raise Counterexample(broken, trace, f"seed {seed} of {scenario}") from broken
    return len(trace)


def random_scenario(seed: int, losses: bool) -> Scenario:
    """Return random programs of four or five workers that share references."""
    rng = random.Random(f"scenario {seed}")
    count = rng.choice([4, 5])
    scripts: list[list[Action]] = [[] for _ in range(count)]
    reborn: dict[int, list[Action]] = {worker: [] for worker in range(count)}
    holders: dict[RRefId, set[int]] = {}
    failing: list[tuple[int, RRefId]] = []
    for number in range(rng.randint(1, 5)):
        creator, owner = rng.randrange(count), rng.randrange(count)
        second_life = losses and rng.random() < 0.15
        rref = RRefId(creator, number + (100 if second_life else 0))
        verb = rng.choices(["create", "own", "unsent", "refuse"], [8, 2, 1, 1])[0]
        nested = [x for x, by in holders.items() if creator in by and rng.random() < 0.3] if verb == "create" else []
        step = (verb, rref) if verb == "own" else (verb, rref, owner, *(nested if owner != creator else ()))
        if verb in ("unsent", "refuse") and owner == creator:
            step = ("own", rref)
        elif verb == "unsent":
            failing.append((creator, rref))
        (reborn if second_life else scripts)[creator].append(step)
        holders[rref] = {creator}
        for _ in range(rng.randint(1, 8)):
            holder, to = rng.choice(sorted(holders[rref])), rng.randrange(count)
            verb = rng.choices(["share", "discard", "hold", "clone"], [10, 1, 1, 1])[0]
            script = reborn[holder] if second_life and holder == creator else scripts[holder]
            script.append((verb, rref) if verb == "clone" else (verb, rref, to))
            if verb == "share":
                holders[rref].add(to)
    for creator, rref in failing:
        script = (reborn if rref.local_id >= 100 else scripts)[creator]
        made = [step[:2] for step in script].index(("unsent", rref))
        script.insert(rng.randint(made + 1, len(script)), ("fail", rref))
    for script in (*scripts, *reborn.values()):
        script.append(("unhold",))
        if rng.random() < 0.1:
            script.append(("release_all",))
    return Scenario(
        tuple(map(tuple, scripts)),
        drops=rng.choice(["end", "any"]),
        flush=rng.choice(["eager", "free"]),
        batch=rng.choice([1, 2, 64]),
        timeouts=rng.random() < 0.5,
        kills=rng.randint(1, 3) if losses else 0,
        mortal=tuple(range(count)),
        rejoin=rng.random() < 0.5,
        reborn={worker: tuple(script) for worker, script in reborn.items()},
    )
