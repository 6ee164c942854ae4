"""Networks between processes: unplugged, healed, one-way, reset, replaced hosts."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_helpers import (
    HEARTBEAT,
    LOST,
    begin_counting,
    calls_so_far,
    check_clean,
    check_exactly_once,
    counts,
    end_counting,
    loss,
    shut_down,
)
from network_helpers import Network, hosts, missing, network
from process_helpers import TIMEOUT, Actor, call_many, failure, hang, state

from telegrad import autograd, rpc
from telegrad.rpc import Options
from telegrad.testing import eventually
from telegrad.worker.default_worker import current_worker

pytestmark = [pytest.mark.skipif(missing() is not None, reason=str(missing()))]

RESET_UNSUPPORTED = "this kernel does not end connections for `ss -K` (CONFIG_INET_DIAG_DESTROY)"
LARGE = 16 << 20  # elements


@pytest.fixture
def net() -> Iterator[Network]:
    with network(4) as made:
        yield made


@pytest.fixture
def three(net: Network, tmp_path: Path) -> Iterator[list[Actor]]:
    """Workers on hosts 0, 1 and 2, which have all called each other."""
    limits = {"heartbeat": HEARTBEAT, "handshake_timeout": HEARTBEAT, "connect_timeout": 2 * HEARTBEAT}
    with hosts(net, tmp_path, 3, rpc_timeout=0, **limits) as group:
        for actor in group:
            for other in group:
                if other is not actor:
                    assert actor.do(call_many, other.name, 2) == 2
        yield group


# ---- steps


def call_forever(to: str) -> Any:
    return rpc.rpc_sync(to, hang, timeout=0)


def make_reference(to: str) -> None:
    state["held"] = rpc.remote(to, hang, timeout=0)


def fetch_held() -> Any:
    return state.pop("held").to_here(timeout=0)


def transfer(to: str) -> Any:
    tensor = torch.ones(LARGE)
    while "ends" not in state:
        assert rpc.rpc_sync(to, torch.sum, (tensor,), timeout=0).item() == LARGE
        state["transfers"] = state.get("transfers", 0) + 1
    return transfers()


def end_transfers() -> None:
    state["ends"] = True


def transfers() -> int:
    return int(state.get("transfers", 0))


def backward_forever(to: str) -> Any:
    with autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        autograd.backward(context_id, [rpc.rpc_sync(to, held_product, (x,), timeout=0).sum()])


class Held(torch.autograd.Function):
    """Identity whose backward does not end."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        hang()
        return gradient


def held_product(x: torch.Tensor) -> torch.Tensor:
    return Held.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def address_of(name: str) -> str:
    worker = current_worker()
    assert worker is not None
    member = worker.members.get(worker.members.resolve(name).id)
    assert member is not None
    return str(member.addresses[0])


def lanes() -> int:
    worker = current_worker()
    assert worker is not None
    return int(worker.engine.stats()["lanes"])


def connections() -> int:
    worker = current_worker()
    assert worker is not None
    return int(worker.engine.stats()["connections"])


# ---- cut and healed


def test_both_sides_of_a_cut_lose_each_other(three: list[Actor], net: Network) -> None:
    """Calls, references, passes and transfers end; those of other workers go on."""
    first, cut_off, other = three
    first.do(make_reference, "w1")
    waits = [
        first.begin(loss, call_forever, "w1"),
        first.begin(loss, fetch_held),
        first.begin(loss, backward_forever, "w1"),
        first.begin(loss, transfer, "w1"),
        cut_off.begin(loss, call_forever, "w0"),
        cut_off.begin(loss, call_forever, "w2"),
    ]
    eventually(lambda: first.do(transfers) > 0)
    net.unplug(1)
    begun = time.monotonic()
    for wait in waits:
        assert wait.result() in ("WorkerLost", "OwnerLost")
    assert time.monotonic() - begun < LOST
    assert first.do(call_many, "w2", 10) == other.do(call_many, "w0", 10) == 10
    net.plug(1)
    for caller, callee in ((first, "w1"), (cut_off, "w0"), (cut_off, "w2")):
        assert caller.do(call_until_reached, callee) == 5


def call_until_reached(to: str) -> int:
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            return int(rpc.rpc_sync(to, abs, (-5,), timeout=5))
        except RuntimeError:
            if time.monotonic() > deadline:
                raise


def test_a_short_cut_costs_no_call(three: list[Actor], net: Network) -> None:
    """The kernel sends the lost packets again."""
    first, callee, other = three
    first.do(begin_counting, "w1")
    eventually(lambda: first.do(calls_so_far) > 10)
    net.unplug(1)
    assert other.do(call_many, "w0", 10) == 10
    before = first.do(calls_so_far)
    net.plug(1)
    eventually(lambda: first.do(calls_so_far) > before + 10)
    results = first.do(end_counting)
    assert check_exactly_once(results, callee.do(counts), short=True) == 0
    check_clean(*three)
    shut_down(*three)


def test_a_short_cut_costs_no_transfer(three: list[Actor], net: Network) -> None:
    first, _, other = three
    step = first.begin(transfer, "w1")
    eventually(lambda: first.do(transfers) > 0, timeout=TIMEOUT)
    net.unplug(1)
    assert other.do(call_many, "w0", 10) == 10
    before = first.do(transfers)
    net.plug(1)
    eventually(lambda: first.do(transfers) > before, timeout=TIMEOUT)
    first.do(end_transfers)
    assert step.result() > before
    check_clean(*three)
    shut_down(*three)


def test_a_long_cut_heals(three: list[Actor], net: Network) -> None:
    first, callee, _ = three
    first.do(begin_counting, "w1")
    eventually(lambda: first.do(calls_so_far) > 10)
    net.unplug(1)
    eventually(lambda: "w1 is lost" in first.stderr() and "w0 is lost" in callee.stderr(), timeout=LOST)
    net.plug(1)
    assert first.do(call_until_reached, "w1") == 5
    results = first.do(end_counting)
    assert check_exactly_once(results, callee.do(counts), short=False) > 0
    check_clean(*three)
    shut_down(*three)


def test_a_cut_in_one_direction_is_a_loss_for_both(three: list[Actor], net: Network) -> None:
    first, second, other = three
    waits = [first.begin(loss, call_forever, "w1"), second.begin(loss, call_forever, "w0")]
    begun = time.monotonic()
    with net.dropped(1, 0):
        for wait in waits:
            assert wait.result() == "WorkerLost"
        assert time.monotonic() - begun < LOST
        assert second.do(call_many, "w2", 10) == other.do(call_many, "w0", 10) == 10
    assert first.do(call_until_reached, "w1") == 5
    check_clean(other)


# ---- resets


def test_a_reset_connection_between_live_processes(three: list[Actor], net: Network) -> None:
    first, callee, other = three
    for actor in (first, other):
        actor.do(begin_counting, "w1")
        eventually(lambda actor=actor: actor.do(calls_so_far) > 10)  # type: ignore[misc]
    for _ in range(3):
        before = first.do(calls_so_far)
        if net.reset(0, 1) == 0:
            pytest.skip(RESET_UNSUPPORTED)
        eventually(lambda before=before: first.do(calls_so_far) > before + 10)  # type: ignore[misc]
    results = first.do(end_counting)
    undisturbed = other.do(end_counting)
    ran = callee.do(counts)
    assert None not in undisturbed.values(), "the connection of the other worker was not reset"
    assert undisturbed == {number: number * number for number in undisturbed}
    for number in undisturbed:
        ran.remove(number)
    check_exactly_once(results, ran, short=True)
    check_clean(*three)
    shut_down(*three)


def test_a_reset_that_one_end_sees(three: list[Actor], net: Network) -> None:
    """The other end has a half-open connection, until the next one replaces it."""
    first, callee, _ = three
    first.do(begin_counting, "w1")
    eventually(lambda: first.do(calls_so_far) > 10)
    with net.rejected(1, 0):
        pass
    results_before = first.do(calls_so_far)
    eventually(lambda: first.do(calls_so_far) > results_before + 10)
    with net.rejected(1, 0):
        time.sleep(0.05)  # at least one packet is rejected; longer would be a cut
    before = first.do(calls_so_far)
    eventually(lambda: first.do(calls_so_far) > before + 10)
    check_exactly_once(first.do(end_counting), callee.do(counts), short=True)
    check_clean(*three)
    shut_down(*three)


def test_reset_lanes_cost_no_transfer(three: list[Actor], net: Network) -> None:
    """Large messages are striped over several connections; no byte of them is lost."""
    first, callee, other = three
    step = first.begin(transfer, "w1")
    eventually(lambda: first.do(transfers) > 1, timeout=TIMEOUT)
    if net.reset(0, 1) == 0:
        pytest.skip(RESET_UNSUPPORTED)
    before = first.do(transfers)
    eventually(lambda: first.do(transfers) > before + 2, timeout=TIMEOUT)
    first.do(end_transfers)
    assert step.result() > before
    assert other.do(call_many, "w1", 10) == callee.do(call_many, "w0", 10) == 10
    check_clean(*three)
    shut_down(*three)


# ---- hosts that come back


def join_elastic(name: str, where: str, address: str) -> None:
    options = Options(
        init_method=where,
        rpc_timeout=0,
        heartbeat=HEARTBEAT,
        handshake_timeout=HEARTBEAT,
        connect_timeout=2 * HEARTBEAT,
        member_lease=4 * HEARTBEAT,
        transports=("tcp",),
        bind=address,
    )
    rpc.init_rpc(name, rpc_backend_options=options)


@contextmanager
def elastic_group(net: Network, folder: Path) -> Iterator[tuple[str, list[Actor]]]:
    """Start a worker on each of three hosts; gives the address of their store, too."""
    where = f"tcp://{net.address(0)}:29500"
    group = [Actor(host, folder, net.entrance(host)) for host in range(3)]
    try:
        for host, actor in enumerate(group):
            actor.do(join_elastic, actor.name, where, net.address(host))
        assert group[0].do(call_many, "w1", 2) == group[2].do(call_many, "w1", 2) == 2
        yield where, group
    finally:
        for actor in group:
            actor.clean_up()


def test_a_worker_that_comes_back_under_another_address(net: Network, tmp_path: Path) -> None:
    """The old host loses its power, so no end of its connections arrives."""
    with elastic_group(net, tmp_path) as (where, group):
        first, old, other = group
        assert net.address(1) in first.do(address_of, "w1")
        waiting = first.begin(loss, call_forever, "w1")
        net.unplug(1)
        assert old.process.pid is not None
        os.kill(old.process.pid, signal.SIGKILL)
        assert waiting.result() == "WorkerLost"
        new = Actor(3, tmp_path, net.entrance(3))
        group.append(new)
        new.do(join_elastic, "w1", where, net.address(3))
        assert first.do(call_until_reached, "w1") == other.do(call_until_reached, "w1") == 5
        assert net.address(3) in first.do(address_of, "w1")
        assert new.do(call_many, "w0", 5) == new.do(call_many, "w2", 5) == 5
        shut_down(first, other, new)


def test_a_worker_that_comes_back_under_the_same_address(net: Network, tmp_path: Path) -> None:
    """The host loses its power and starts again; what waited for the old worker ends."""
    with elastic_group(net, tmp_path) as (where, group):
        first, old, other = group
        waits = [first.begin(loss, call_forever, "w1"), other.begin(loss, call_forever, "w1")]
        net.unplug(1)
        old.end()
        net.plug(1)
        new = Actor(3, tmp_path, net.entrance(1))
        group.append(new)
        new.do(join_elastic, "w1", where, net.address(1))
        assert [waiting.result() for waiting in waits] == ["WorkerLost"] * 2
        assert first.do(call_until_reached, "w1") == other.do(call_until_reached, "w1") == 5
        assert new.do(call_many, "w0", 5) == new.do(call_many, "w2", 5) == 5
        check_clean(first, new, other)
        shut_down(first, other, new)


def test_a_replaced_host_that_wakes_up_is_fenced(net: Network, tmp_path: Path) -> None:
    """Its cable is plugged in again after another worker has taken its name."""
    where = f"tcp://{net.address(0)}:29500"
    group = [Actor(host, tmp_path, net.entrance(host)) for host in range(2)]
    try:
        for host, actor in enumerate(group):
            actor.do(join_elastic, actor.name, where, net.address(host))
        first, old = group
        assert first.do(call_many, "w1", 2) == 2
        waiting = first.begin(loss, call_forever, "w1")
        net.unplug(1)
        assert waiting.result() == "WorkerLost"
        new = Actor(3, tmp_path, net.entrance(3))
        group.append(new)
        new.do(join_elastic, "w1", where, net.address(3))
        net.plug(1)
        assert old.begin(loss, call_forever, "w0").result() == "WorkerLost"
        assert first.do(call_until_reached, "w1") == 5
        assert net.address(3) in first.do(address_of, "w1")
        shut_down(first, new)
    finally:
        for actor in group:
            actor.clean_up()


# ---- newcomers


def names() -> list[str]:
    worker = current_worker()
    assert worker is not None
    return [info.name for info in worker.members.infos()]


def test_a_newcomer_behind_a_firewall_changes_nothing(net: Network, tmp_path: Path) -> None:
    """A firewall is between it and w1. It tries a new name, and that of w1."""
    with elastic_group(net, tmp_path) as (where, group):
        new = Actor(3, tmp_path, net.entrance(3))
        group.append(new)
        with net.dropped(1, 3), net.dropped(3, 1):
            for name, said in (("w3", "no connection to its live member w1"), ("w1", "rank 1 is taken by worker w1")):
                error, text = new.begin(failure, join_elastic, name, where, net.address(3)).result()
                assert (error, said in text) == ("TelegradError", True), text
                assert [member.do(names) for member in group[:3]] == [["w0", "w1", "w2"]] * 3
                assert group[0].do(call_many, "w1", 2) == group[1].do(call_many, "w0", 2) == 2
        new.do(join_elastic, "w3", where, net.address(3))
        eventually(lambda: all(member.do(names) == ["w0", "w1", "w2", "w3"] for member in group))
        assert new.do(call_many, "w1", 2) == group[1].do(call_many, "w3", 2) == 2
        shut_down(*group)
