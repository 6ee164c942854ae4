"""Mutants of the table: each rule that is removed breaks a guarantee.

Only the guarantees of the protocol are checked (G1, G2, G3, L1), not the table's inner invariants. So each mutant shows
the purpose of its rule.
"""

import dataclasses
from typing import Any

import pytest
from rref_explorer import Counterexample, explore
from rref_scenarios import BEGUN, CREATE, FAST, OWN, SLOW, X, world
from rref_world import Scenario

from telegrad.protocols.rref import Abandon, OwnerState, RRefTable, UserState
from telegrad.protocols.rref_outbox import Outbox
from telegrad.protocols.rref_owner import OwnerEntry, Owners
from telegrad.protocols.rref_user import Users

FORK = (CREATE, ("share", X, 2))


class SharesWithoutPin(Users):
    __slots__ = ()

    def share(self, rref, entry, to, kind, epoch=None):
        ticket = super().share(rref, entry, to, kind, epoch)
        del self.transfers[ticket.transfer]
        entry.pins -= 1
        return ticket


class AcceptsBeforeTheOwnerKnows(Users):
    __slots__ = ()

    def receive_fork(self, rref, owner, sender, transfer):
        super().receive_fork(rref, owner, sender, transfer)
        self._accept_parents(self.entries[rref])


class EndsBeforeTheOwnerAnswers(Users):
    __slots__ = ()

    def _settle(self, rref, entry):
        entry.adding = False
        super()._settle(rref, entry)


class FailedReleasesUnderItsPins(Users):
    __slots__ = ()

    def _settle(self, rref, entry):
        if entry.state is UserState.FAILED and entry.tokens:
            self._out.release(entry.owner, rref, entry.tokens)
            entry.tokens = 0
        super()._settle(rref, entry)


class KeepsPinsTowardsTheDead(Users):
    __slots__ = ()

    def peer_lost(self, peer, why):
        kept = {transfer: what for transfer, what in self.transfers.items() if what[1] == peer}
        for transfer in kept:
            del self.transfers[transfer]
        super().peer_lost(peer, why)
        self.transfers.update(kept)


class AcceptsToTheNextLife(Users):
    __slots__ = ()

    def peer_lost(self, peer, why):
        parents = {rref: list(entry.parents) for rref, entry in self.entries.items()}
        super().peer_lost(peer, why)
        for rref, entry in self.entries.items():
            entry.parents = parents[rref]


class AlwaysAbandons(Users):
    __slots__ = ()

    def on_expect(self, sender, message):
        self._out.send(sender, Abandon(message.rref, "wrong"))


class ForgetsThatItWasAsked(Users):
    __slots__ = ()

    def on_expect(self, sender, message):
        super().on_expect(sender, message)
        if message.rref in self.entries:
            self.entries[message.rref].asked = False


class GrantsUncounted(Owners):
    __slots__ = ()

    def grant(self, rref, entry, to, epoch=None):
        ticket = super().grant(rref, entry, to, epoch)
        entry.tokens.pop(to, None)
        return ticket


class KeepsTokensOfTheDead(Owners):
    __slots__ = ()

    def peer_lost(self, peer, why):
        pass


class NeverAsksTheCreator(Owners):
    __slots__ = ()

    def _expect(self, rref):
        entry = self.entries[rref] = OwnerEntry(OwnerState.EXPECTED, handles=0)
        return entry


class UnsharesForTheNextLife(Owners):
    __slots__ = ()

    def ungrant(self, ticket, to):
        self.on_release(to, ticket.rref, 1)


class CountsForTheNextSession(Outbox):
    __slots__ = ()

    def delivers(self, to, epoch):
        return to not in self.lost


class ReturnsInTheSameEpoch(Outbox):
    __slots__ = ()

    def resume(self, peer):
        self.lost.pop(peer, None)


class ForgetsTheDead(Outbox):
    __slots__ = ()

    def forget(self, peer, why):
        super().forget(peer, why)
        del self.lost[peer]


MUTANTS: list[tuple[type, str, Scenario]] = [
    (SharesWithoutPin, "G2", FAST["fork"]),
    (SharesWithoutPin, "G2", FAST["return"]),
    (AcceptsBeforeTheOwnerKnows, "G2", FAST["fork"]),
    (EndsBeforeTheOwnerAnswers, "G1|L1", FAST["fork"]),
    (FailedReleasesUnderItsPins, "G2", FAST["fork"]),
    (KeepsPinsTowardsTheDead, "G1|L1", FAST["fork, deaths"]),
    (AcceptsToTheNextLife, "G2", SLOW["a creator returns"]),
    (AlwaysAbandons, "G2", FAST["return"]),
    (ForgetsThatItWasAsked, "L1", FAST["never sent"]),
    (GrantsUncounted, "G2", world((), (("own", OWN), ("share", OWN, 0)), ())),
    (KeepsTokensOfTheDead, "G1", FAST["fork, deaths"]),
    (NeverAsksTheCreator, "L1", FAST["never sent"]),
    (UnsharesForTheNextLife, "G2", FAST["unshared to a returned worker"]),
    (CountsForTheNextSession, "G1|L1", BEGUN["forked"]),
    (CountsForTheNextSession, "G1|L1", BEGUN["granted"]),
    (ReturnsInTheSameEpoch, "G2", BEGUN["granted, sent in the next session"]),
    (ForgetsTheDead, "G3", FAST["fork, deaths"]),
]


def mutated(mutant: type, scenario: Scenario) -> Scenario:
    def mutate(table: RRefTable) -> None:
        part: Any = {Users: table._users, Owners: table._owners, Outbox: table._out}[mutant.__mro__[1]]
        part.__class__ = mutant

    return dataclasses.replace(scenario, mutate=mutate)


@pytest.mark.parametrize(("mutant", "guarantee", "scenario"), MUTANTS, ids=[m[0].__name__ for m in MUTANTS])
def test_the_explorer_catches(mutant: type, guarantee: str, scenario: Scenario) -> None:
    with pytest.raises(Counterexample, match=f"Broken\\(.({guarantee})"):
        explore(mutated(mutant, scenario), guarantees_only=True)
