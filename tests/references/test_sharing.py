"""References are sent in any value and direction; the last one frees the value."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from rref_helpers import TIMEOUT, Tracked, alive, forward, freed, greet, is_here, make, own, ping

from telegrad.rpc import RRef, remote, rpc_sync
from telegrad.testing import Cluster


@pytest.mark.parametrize(
    "path",
    [
        ["w1"],
        ["w2"],
        ["w0"],
        ["w2", "w1"],
        ["w1", "w2"],
        ["w2", "w0"],
        ["w0", "w1", "w2", "w0", "w2", "w1"],
        ["w1", "w1", "w1"],
        ["w2", "w2", "w1", "w1"],
    ],
    ids="-".join,
)
def test_handed_from_worker_to_worker(w: Cluster, path: list[str]) -> None:
    rref = w[0].remote("w1", make, ("travels",))
    assert w[0].rpc_sync(path[0], forward, (rref, *path[1:])) == "travels greets you"
    assert alive("travels")
    del rref
    assert freed("travels").wait(TIMEOUT)


def test_of_the_caller_itself(w: Cluster) -> None:
    rref = w[0].rref(Tracked("mine"))
    assert w[0].rpc_sync("w1", forward, (rref, "w2", "w1", "w0")) == "mine greets you"
    assert w[0].rpc_sync("w0", is_here, (rref, "mine"))
    assert rref.is_owner()
    assert rref.owner_name() == "w0"
    del rref
    assert freed("mine").wait(TIMEOUT)


def test_back_at_its_owner_it_is_the_value_itself(w: Cluster) -> None:
    rref = w[0].remote("w1", make, ("home",))
    assert w[0].rpc_sync("w1", is_here, (rref, "home"))
    assert not w[0].rpc_sync("w2", is_here, (rref, "home"))


@dataclass
class Basket:
    things: dict[str, Any]


def greet_all(basket: Any, *, more: Any = None) -> list[str]:
    if isinstance(basket, Basket):
        basket = basket.things
    if isinstance(basket, dict):
        basket = basket.values()
    return [greet(one) for one in [*basket, *(more or ())]]


@pytest.mark.parametrize(
    "pack",
    [lambda a, b: [a, b], lambda a, b: (a, b), lambda a, b: {"a": a, "b": b}, lambda a, b: Basket({"a": a, "b": b})],
    ids=["list", "tuple", "dict", "object"],
)
def test_in_containers_and_objects(w: Cluster, pack: Any) -> None:
    a, b = w[0].remote("w1", make, ("a",)), w[0].remote("w2", make, ("b",))
    assert w[0].rpc_sync("w2", greet_all, (pack(a, b),)) == ["a greets you", "b greets you"]
    assert w[0].rpc_sync("w2", greet_all, ([],), {"more": [b, a, a]}) == [f"{x} greets you" for x in "baa"]
    del a, b
    assert freed("a").wait(TIMEOUT)
    assert freed("b").wait(TIMEOUT)


def closure(function: Callable[[Any], Any], value: Any) -> Callable[[], Any]:
    return lambda: function(value)


def test_in_closures(w: Cluster) -> None:
    rref = w[0].remote("w1", make, ("enclosed",))
    assert w[0].rpc_sync("w2", closure(greet, rref)) == "enclosed greets you"
    del rref
    assert freed("enclosed").wait(TIMEOUT)


def test_as_arguments_of_methods_and_creations(w: Cluster) -> None:
    holder = w[0].remote("w1", Tracked, ("holder",))
    held = w[0].remote("w2", make, ("held",))
    made = w[0].remote("w1", Tracked, ("keeper", held))
    assert holder.rpc_sync().greet("x") == "holder greets x"
    assert made.rpc_sync().greet("x") == "keeper greets x"
    del held
    assert w[0].rpc_sync("w2", ping) == "pong"
    assert alive("held"), "its holder on w1 is alive"
    del made
    assert freed("keeper").wait(TIMEOUT)
    assert freed("held").wait(TIMEOUT)


def nest(owner: str, name: str) -> RRef[Tracked]:
    return remote(owner, make, (name,))


@pytest.mark.parametrize("inner", ["w0", "w1", "w2"])
def test_reference_to_a_reference(w: Cluster, inner: str) -> None:
    outer = w[0].remote("w1", nest, (inner, "inner"))
    rref = outer.to_here()
    assert greet(rref) == "inner greets you"
    assert w[0].rpc_sync("w2", closure(lambda rref: greet(rref.to_here()), outer)) == "inner greets you"
    del outer
    assert greet(rref) == "inner greets you"
    del rref
    assert freed("inner").wait(TIMEOUT)


@pytest.mark.parametrize("owner", ["w0", "w1", "w2"])
def test_as_results(w: Cluster, owner: str) -> None:
    rref = w[0].rpc_sync("w1", nest, (owner, "result"))
    assert rref.owner_name() == owner
    assert greet(rref) == "result greets you"
    assert [greet(one) for one in w[0].rpc_sync("w1", list, ((rref, rref),))] == ["result greets you"] * 2
    del rref
    assert freed("result").wait(TIMEOUT)


def test_of_asynchronous_results(w: Cluster) -> None:
    rref = w[0].rpc_async("w2", own, ("later",)).wait()
    assert greet(rref) == "later greets you"
    del rref
    assert freed("later").wait(TIMEOUT)


def test_two_equal_references_are_two_handles(w: Cluster) -> None:
    rref = w[0].remote("w1", make, ("twice",))
    (again,) = w[0].rpc_sync("w2", list, ((rref,),))
    assert again is not rref
    assert again.id == rref.id
    del rref
    assert greet(again) == "twice greets you"
    del again
    assert freed("twice").wait(TIMEOUT)


def pass_on(rref: RRef[Tracked], to: str) -> None:
    rpc_sync(to, keep, (rref,))


_kept: list[Any] = []


def keep(rref: RRef[Tracked]) -> None:
    _kept.append(rref)


def test_the_last_holder_decides(w: Cluster) -> None:
    rref = w[0].remote("w1", make, ("kept",))
    w[0].rpc_sync("w2", pass_on, (rref, "w2"))
    del rref
    assert w[0].rpc_sync("w1", ping) == "pong"
    assert _kept[0].rpc_sync().greet("us") == "kept greets us"
    assert alive("kept")
    _kept.clear()
    assert freed("kept").wait(TIMEOUT)
