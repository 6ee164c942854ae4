"""Hosts that cannot be reached, or only in one direction, and hosts without IPv4."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fault_helpers import check_clean, shut_down
from network_helpers import Network, missing, network
from process_helpers import TIMEOUT, Actor, call_many, failure, join

from telegrad import rpc
from telegrad.testing import eventually

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

CONNECT = 1.0  # s
SOON = 2.0  # s, on a busy machine
UNUSED = "10.78.0.99"


@contextmanager
def workers(net: Network, folder: Path, *each: dict[str, Any], where: str = "") -> Iterator[list[Actor]]:
    """Start a worker on each host, with options of its own.

    Args:
        where: The store of a dynamic group; by default, the group is static and meets at a file.
    """
    group = [Actor(host, folder, net.entrance(host)) for host in range(len(each))]
    size = None if where else len(each)
    try:
        steps = []
        for actor, more in zip(group, each, strict=True):
            options = {"transports": ("tcp",), "bind": net.address(actor.rank), "connect_timeout": CONNECT, **more}
            rank = actor.rank if size else -1
            steps.append(actor.begin(join, actor.name, rank, size, where or f"file://{folder}/store", options))
            if where:
                steps[-1].result()
        for step in steps:
            step.result()
        yield group
    finally:
        for actor in group:
            actor.clean_up()


@pytest.fixture
def net() -> Iterator[Network]:
    with network(3) as made:
        yield made


# ---- steps


def call(to: str) -> int:
    return int(rpc.rpc_sync(to, abs, (-5,), timeout=0))


def has_ipv4() -> bool:
    """Return whether this process can send anything to another host by IPv4."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect((UNUSED, 9))
        except OSError:
            return False
    return True


def reaches(to: str) -> bool:
    return failure(call, to) == ("", "5")


# ---- tests


def test_a_host_that_is_silent_before_the_first_call(net: Network, tmp_path: Path) -> None:
    """The call fails when the time to connect is over; later ones work again."""
    with workers(net, tmp_path, {}, {}, {}) as group:
        first, second, third = group
        net.unplug(1)
        begun = time.monotonic()
        kind, text = first.do(failure, call, "w1")
        assert (kind, "worker w1" in text) == ("WorkerLost", True), text
        assert time.monotonic() - begun < CONNECT + SOON
        assert first.do(call_many, "w2", 10) == third.do(call_many, "w0", 10) == 10
        net.plug(1)
        for caller, callee in ((first, "w1"), (second, "w2")):
            eventually(lambda caller=caller, callee=callee: caller.do(reaches, callee), timeout=TIMEOUT)  # type: ignore[misc]
        check_clean(*group)
        shut_down(*group)


def test_a_worker_that_advertises_loopback(net: Network, tmp_path: Path) -> None:
    """The error names the address; the worker itself can call, which heals it."""
    with workers(net, tmp_path, {}, {"advertise": "127.0.0.1"}) as group:
        first, second = group
        begun = time.monotonic()
        kind, text = first.do(failure, call, "w1")
        assert (kind, "127.0.0.1" in text) == ("WorkerLost", True), text
        assert time.monotonic() - begun < SOON
        eventually(lambda: second.do(reaches, "w0"), timeout=TIMEOUT)
        eventually(lambda: first.do(reaches, "w1"), timeout=TIMEOUT)
        check_clean(*group)
        shut_down(*group)


@pytest.mark.slow
def test_a_worker_that_advertises_an_address_of_no_host(net: Network, tmp_path: Path) -> None:
    """The error comes when the time to connect is over, and names the address."""
    enough = 5 * CONNECT  # for the kernel to report that no host has the address
    with workers(net, tmp_path, {"connect_timeout": enough}, {"advertise": UNUSED}) as group:
        first, second = group
        begun = time.monotonic()
        kind, text = first.do(failure, call, "w1")
        assert (kind, UNUSED in text) == ("WorkerLost", True), text
        assert time.monotonic() - begun < enough + SOON
        eventually(lambda: second.do(reaches, "w0"), timeout=TIMEOUT)
        eventually(lambda: first.do(reaches, "w1"), timeout=TIMEOUT)
        check_clean(*group)
        shut_down(*group)


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_hosts_without_ipv4(static: bool, tmp_path: Path) -> None:
    with network(3, ipv6=True) as net:
        where = "" if static else f"tcp://[{net.address(0)}]:29500"
        with workers(net, tmp_path, {}, {}, {}, where=where) as group:
            for actor in group:
                assert not actor.do(has_ipv4)
                for other in group:
                    assert actor.do(call_many, other.name, 5) == 5
            check_clean(*group)
            shut_down(*group)
