"""Two workers in two network namespaces with a veth pair: TCP as between hosts."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from bench import functions, limit
from bench.groups import ask
from bench.networks import cable
from bench.networks import missing as no_namespaces
from bench.peers.base import Client, Peer, Place, Unsupported
from bench.row import AtMost, Family, Goal, Row, Samples, Take, TimesLess, TimesLimit
from bench.rows.calls import SERVER, right

__all__ = ["NETWORKS", "iperf3"]

MB = 1 << 20
SIZE = 64 * MB
SPANNING = {
    "telegrad": "",
    "torch uv": "",
    "gRPC": "",
    "torch": "",
    "": "would need a cluster of hosts",
}


@contextmanager
def places(gigabits: float | None) -> Iterator[tuple[Place, Place]]:
    if (why := no_namespaces()) is not None:
        raise Unsupported(why)
    with cable(gigabits) as both:
        yield both


def ask_across(peer: Peer, gigabits: float | None, function: object, take: Take) -> Samples:
    if not peer.spans_hosts:
        raise Unsupported("its cross-memory attach would go round the network: see torch uv")
    with places(gigabits) as both:
        found: Samples = ask(peer, 2, function, take, places=both, seconds=100)  # type: ignore[arg-type]
    return found


def one_way(gigabits: float | None, peer: Peer, take: Take) -> Samples:
    return ask_across(peer, gigabits, _sent, take)


def _sent(client: Client, take: Take) -> Samples:
    call = client.caller(SERVER, functions.size_of, torch.ones(SIZE // 4))
    right(call(), SIZE // 4)
    return take(call)


def small(peer: Peer, take: Take) -> Samples:
    return ask_across(peer, None, _small, take)


def _small(client: Client, take: Take) -> Samples:
    call = client.caller(SERVER, functions.identity, 7)
    right(call(), 7)
    return take(call)


def iperf3() -> bool:
    return shutil.which("iperf3") is not None


def stream(gigabits: float | None, take: Take) -> Sequence[float]:
    """Seconds for 64 MB as iperf3 moves them; without it, as limit.cc does."""
    with places(gigabits) as (near, far):
        return _iperf3(near, far, take) if iperf3() else _own_stream(near, far, SIZE, take)


def echo(take: Take) -> Sequence[float]:
    """Round trips of 64 bytes."""
    with places(None) as (near, far):
        return _own_stream(near, far, 64, take)


def within(place: Place, *command: object) -> tuple[str, ...]:
    return ("nsenter", "-t", str(place.namespace), "-n", *map(str, command))


def _iperf3(near: Place, far: Place, take: Take) -> list[float]:
    listening = within(far, "iperf3", "--server", "--one-off", "--bind", far.address, "--forceflush")
    with subprocess.Popen(listening, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if "listening" in line.lower():
                break
        command = within(near, "iperf3", "--client", far.address, "--time", max(1, round(take.seconds)), "--json")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = json.loads(done.stdout)
        server.stdout.read()
    if "error" in found:
        raise RuntimeError(f"iperf3: {found['error']}")
    return [SIZE * 8 / interval["sum"]["bits_per_second"] for interval in found["intervals"]]


def _own_stream(near: Place, far: Place, size: int, take: Take) -> list[float]:
    serving = within(far, limit.program(), "serve", far.address)
    with subprocess.Popen(serving, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        return limit.measure("send", far.address, port, size, take.seconds, prefix=within(near))


def sent(label: str, gigabits: float | None, seconds: float, *goals: Goal) -> Row:
    return Row(
        f"64 MB one way, {label}",
        partial(one_way, gigabits),
        workers=0,
        seconds=seconds,
        repeats=40,
        warm_up=1e-9,
        limit=partial(stream, gigabits),
        amount=SIZE,
        of="bytes",
        goals=goals,
        only=SPANNING,
        rounds=2,
        patience=150,
        quick=gigabits is None,
    )


NETWORKS = Family(
    "networks",
    "two network namespaces with a cable between them; the limit is iperf3, where that is missing limit.cc",
    (
        Row(
            "identity over TCP, int",
            small,
            workers=0,
            limit=echo,
            only=SPANNING,
            patience=150,
        ),
        sent("plain", None, 1.0, TimesLimit(1 / 0.75), TimesLess(2, "torch uv")),
        sent("10 Gbit/s", 10, 1.0),
        sent("1 Gbit/s", 1, 1.6, AtMost(SIZE * 8 / 1e9 / 0.95, "that of 0.95 of the line rate")),
    ),
)
