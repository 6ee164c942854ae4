"""Two workers in two network namespaces with a veth pair: TCP as between hosts."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from bench import baseline, functions
from bench.competitors.base import Client, Competitor, Place, Unsupported
from bench.groups import run_in_group
from bench.networks import cable
from bench.networks import missing as no_namespaces
from bench.row import AtMost, Family, FasterThan, Goal, Row, Sampler, Samples, WithinBaseline
from bench.rows.calls import SERVER, right

__all__ = ["NETWORKS", "iperf3"]

MB = 1 << 20
SIZE = 64 * MB
SPANNING = {
    "telegrad": "",
    "parent": "",
    "torch uv": "",
    "gRPC": "",
    "torch": "",
    "": "would need a cluster of hosts",
}


@contextmanager
def places(gigabits: float | None) -> Iterator[tuple[Place, Place]]:
    if (reason := no_namespaces()) is not None:
        raise Unsupported(reason)
    with cable(gigabits) as both:
        yield both


def run_across_hosts(competitor: Competitor, gigabits: float | None, function: object, sampler: Sampler) -> Samples:
    if not competitor.spans_hosts:
        raise Unsupported("its cross-memory attach would bypass the network: see torch uv")
    with places(gigabits) as both:
        found: Samples = run_in_group(competitor, 2, function, sampler, places=both, seconds=100)  # type: ignore[arg-type]
    return found


def one_way(gigabits: float | None, competitor: Competitor, sampler: Sampler) -> Samples:
    return run_across_hosts(competitor, gigabits, _sent, sampler)


def _sent(client: Client, sampler: Sampler) -> Samples:
    call = client.caller(SERVER, functions.size_of, torch.ones(SIZE // 4))
    right(call(), SIZE // 4)
    return sampler(call)


def small(competitor: Competitor, sampler: Sampler) -> Samples:
    return run_across_hosts(competitor, None, _small, sampler)


def _small(client: Client, sampler: Sampler) -> Samples:
    call = client.caller(SERVER, functions.identity, 7)
    right(call(), 7)
    return sampler(call)


def iperf3() -> bool:
    return shutil.which("iperf3") is not None


def stream(gigabits: float | None, sampler: Sampler) -> Sequence[float]:
    """Measure a transfer of 64 MB by iperf3, or by baseline.cc if it is not installed."""
    with places(gigabits) as (near, far):
        return _iperf3(near, far, sampler) if iperf3() else _own_stream(near, far, SIZE, sampler)


def echo(sampler: Sampler) -> Sequence[float]:
    """Measure round trips of 64 bytes."""
    with places(None) as (near, far):
        return _own_stream(near, far, 64, sampler)


def within(place: Place, *command: object) -> tuple[str, ...]:
    return ("nsenter", "-t", str(place.namespace), "-n", *map(str, command))


def _iperf3(near: Place, far: Place, sampler: Sampler) -> list[float]:
    listening = within(far, "iperf3", "--server", "--one-off", "--bind", far.address, "--forceflush")
    with subprocess.Popen(listening, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if "listening" in line.lower():
                break
        command = within(near, "iperf3", "--client", far.address, "--time", max(1, round(sampler.seconds)), "--json")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = json.loads(done.stdout)
        server.stdout.read()
    if "error" in found:
        raise RuntimeError(f"iperf3: {found['error']}")
    return [SIZE * 8 / interval["sum"]["bits_per_second"] for interval in found["intervals"]]


def _own_stream(near: Place, far: Place, size: int, sampler: Sampler) -> list[float]:
    serving = within(far, baseline.program(), "serve", far.address)
    with subprocess.Popen(serving, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        return baseline.measure("send", far.address, port, size, sampler.seconds, prefix=within(near))


def sent(label: str, gigabits: float | None, seconds: float, *goals: Goal) -> Row:
    return Row(
        f"64 MB one way, {label}",
        partial(one_way, gigabits),
        workers=0,
        seconds=seconds,
        repeats=40,
        warm_up=1e-9,
        baseline=partial(stream, gigabits),
        amount=SIZE,
        of="bytes",
        goals=goals,
        only=SPANNING,
        rounds=2,
        timeout=150,
        quick=gigabits is None,
    )


NETWORKS = Family(
    "networks",
    "two network namespaces with a cable between them; the baseline is iperf3, or baseline.cc without iperf3",
    (
        Row(
            "identity over TCP, int",
            small,
            workers=0,
            baseline=echo,
            only=SPANNING,
            timeout=150,
        ),
        sent("plain", None, 1.0, WithinBaseline(1 / 0.75), FasterThan(2, "torch uv")),
        sent("10 Gbit/s", 10, 1.0),
        sent("1 Gbit/s", 1, 1.6, AtMost(SIZE * 8 / 1e9 / 0.95, "that of 0.95 of the line rate")),
    ),
)
