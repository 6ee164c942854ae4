"""Every interleaving of small scenarios keeps the invariants.

The order of deliveries, drops, timeouts and deaths is explored.
"""

import pytest
from rref_explorer import Counterexample, explore, replay
from rref_scenarios import FAST, SLOW, X, world

from telegrad.protocols.rref_user import Users


@pytest.mark.parametrize("name", FAST)
def test_every_interleaving(name: str) -> None:
    assert explore(FAST[name]) > 10  # a scenario without events would prove nothing


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SLOW)
def test_every_interleaving_of_larger_worlds(name: str) -> None:
    assert explore(SLOW[name]) > 1000


def test_orders_within_a_pair_are_explored() -> None:
    """A later message may overtake the creation: the owner makes a placeholder."""
    seen = set()

    class Watching(Users):
        __slots__ = ()

        def on_expect(self, sender, message):
            seen.add(message)
            super().on_expect(sender, message)

    def watch(table):
        table._users.__class__ = Watching

    explore(world((("create", X, 1), ("share", X, 1)), (), (), mutate=watch))
    assert seen


def test_a_counterexample_replays() -> None:
    class Unpinned(Users):
        __slots__ = ()

        def share(self, rref, entry, to, kind, epoch=None):
            ticket = super().share(rref, entry, to, kind, epoch)
            entry.pins -= 1
            return ticket

    def mutate(table):
        table._users.__class__ = Unpinned

    broken = world((("create", X, 1), ("share", X, 2)), (), (), mutate=mutate)
    with pytest.raises(Counterexample) as caught:
        explore(broken)
    with pytest.raises(AssertionError, match="P2"):
        replay(broken, caught.value.trace)
    replay(world(*broken.scripts), caught.value.trace)  # the same steps are harmless for the real machine
