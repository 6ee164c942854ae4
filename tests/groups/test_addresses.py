"""Addresses at which a worker listens, and those that it advertises."""

import socket

import pytest
import torch.distributed as dist

from telegrad.group import addresses
from telegrad.options import Options
from telegrad.rpc import Worker

ELSEWHERE = "192.0.2.1"  # of a network reserved for documentation


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Make all routes lead to one address, and list the routes asked for."""
    asked: list[tuple[str, int]] = []

    def address_towards(towards: str, wanted: int = socket.AF_UNSPEC) -> str:
        asked.append((towards, wanted))
        return "10.1.2.3"

    monkeypatch.setattr(addresses, "_own_address", address_towards)
    return asked


@pytest.mark.parametrize(
    ("bound", "store_at", "advertised"),
    [
        ("tcp:0.0.0.0:7", ELSEWHERE, "tcp:10.1.2.3:7"),
        ("tcp:[::]:7", ELSEWHERE, "tcp:10.1.2.3:7"),
        ("tcp:0.0.0.0:7", "127.0.0.1", "tcp:127.0.0.1:7"),
        ("tcp:0.0.0.0:7", "", "tcp:127.0.0.1:7"),
        ("tcp:[::]:7", "localhost", "tcp:[::1]:7"),
        ("tcp:127.0.0.2:7", ELSEWHERE, "tcp:127.0.0.2:7"),
        ("tcp:[fd00::2]:7", ELSEWHERE, "tcp:[fd00::2]:7"),
        ("tcp:[fe80::2%eth0]:7", ELSEWHERE, "tcp:[fe80::2%eth0]:7"),
        ("unix:@name", ELSEWHERE, "unix:@name"),
    ],
)
def test_wildcards_are_never_advertised(
    routes: list[tuple[str, int]], bound: str, store_at: str, advertised: str
) -> None:
    assert addresses.advertised([bound], Options(), store_at) == [advertised]
    if "10.1.2.3" in advertised:
        assert routes == [(store_at, socket.AF_INET if "0.0.0.0" in bound else socket.AF_UNSPEC)]


def test_advertised_address(routes: list[tuple[str, int]]) -> None:
    options = Options(advertise="10.9.9.9")
    assert addresses.advertised(["tcp:0.0.0.0:7", "unix:@a"], options, ELSEWHERE) == ["tcp:10.9.9.9:7", "unix:@a"]
    assert routes == []


@pytest.mark.parametrize(
    ("bound", "advertised"),
    [
        ("tcp:0.0.0.0:7", "tcp:10.9.9.9:7"),
        ("tcp:10.1.2.3:7", "tcp:10.9.9.9:7"),
        ("tcp:[fd00::2]:7", "tcp:[fd00::9]:7"),
        ("tcp:[::]:7", "tcp:[fd00::9]:7"),
    ],
)
def test_a_name_is_advertised_with_an_address_that_the_socket_accepts(
    monkeypatch: pytest.MonkeyPatch, bound: str, advertised: str
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved("fd00::9", "10.9.9.9"))
    assert addresses.advertised([bound], Options(advertise="both.example"), ELSEWHERE) == [advertised]


def test_a_name_without_an_address_that_the_socket_accepts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved("fd00::9"))
    with pytest.raises(RuntimeError, match=r"advertise names six.example.* fd00::9: none of them is an IPv4 address"):
        addresses.advertised(["tcp:0.0.0.0:7"], Options(advertise="six.example"), ELSEWHERE)
    assert addresses.advertised(["tcp:0.0.0.0:7"], Options(advertise="[fd00::9]"), ELSEWHERE) == ["tcp:[fd00::9]:7"]


def resolved(*found: str) -> list[tuple[object, ...]]:
    return [(None, None, None, "", (address, 0)) for address in found]


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
@pytest.mark.openssl
def test_worker_that_listens_everywhere_is_called(wildcard: str) -> None:
    options = Options(bind=wildcard, transports=("tcp",), secret="secret of the group")
    store = dist.HashStore()
    first = Worker("a", store=store, options=options)
    second = Worker("b", store=store, options=options)
    for worker in (first, second):
        (address,) = worker._worker.member.addresses
        assert address.startswith(("tls:127.0.0.1:", "tls:[::1]:"))
    assert first.rpc_sync("b", abs, (-1,)) == 1
    second.shutdown()
    first.shutdown()


def test_an_empty_bind_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_BIND", "")
    listen, host = addresses.listen_addresses(Options(transports=("unix", "tcp")), "127.0.0.1", "a")
    assert host == "127.0.0.1"
    assert "tcp:127.0.0.1:0" in listen
