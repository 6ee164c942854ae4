"""Hosts on a simulated network: namespaces on a bridge, with cables to unplug.

A namespace lives as long as its holder, which ends with this process.
"""

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from process_helpers import Actor, join

from bench.networks import enter
from telegrad.group import process_identity

__all__ = ["Network", "hosts", "missing", "network"]

BRIDGE = "bridge0"
INTERFACE = "eth0"


class Network:
    """Hosts 0, 1, ... with one address each, of IPv4 or of IPv6."""

    def __init__(self, switch: int, holders: list[int], ipv6: bool = False) -> None:
        self._switch = switch
        self._holders = holders
        self._ipv6 = ipv6

    def address(self, host: int) -> str:
        return f"fd78::{host + 1}" if self._ipv6 else f"10.78.0.{host + 1}"

    def interface(self, host: int) -> tuple[str, ...]:
        """Return the arguments of `ip address` that give a host its address."""
        width, *more = ("64", "nodad") if self._ipv6 else ("24",)
        return f"{self.address(host)}/{width}", "dev", INTERFACE, *more

    def entrance(self, host: int) -> Callable[[], None]:
        """Return a function that moves a process to a host."""
        return functools.partial(_move, self._holders[host], f"host {host}")

    def unplug(self, host: int) -> None:
        """Cut the cable of a host. No packet passes, and no end is notified."""
        _run(self._switch, "ip", "link", "set", f"port{host}", "down")

    def plug(self, host: int) -> None:
        """Repair the cable."""
        _run(self._switch, "ip", "link", "set", f"port{host}", "up")

    @contextlib.contextmanager
    def dropped(self, host: int, sender: int) -> Iterator[None]:
        """Drop packets in one direction only."""
        with self._filter(host, sender, "DROP"):
            yield

    @contextlib.contextmanager
    def rejected(self, host: int, sender: int) -> Iterator[None]:
        """Answer TCP packets with a reset, which only their sender sees."""
        with self._filter(host, sender, "REJECT", "--reject-with", "tcp-reset"):
            yield

    def reset(self, host: int, peer: int) -> int:
        """Reset the TCP connections of two hosts at both ends; return their number."""
        found = _run(self._holders[host], "ss", "-KtnH", "state", "established", "dst", self.address(peer))
        return len(found.splitlines())

    @contextlib.contextmanager
    def _filter(self, host: int, sender: int, *action: str) -> Iterator[None]:
        rule = ("INPUT", "-p", "tcp", "-s", self.address(sender), "-j", *action)
        _run(self._holders[host], "iptables", "-A", *rule)
        try:
            yield
        finally:
            _run(self._holders[host], "iptables", "-D", *rule)


@contextmanager
def network(count: int, ipv6: bool = False) -> Iterator[Network]:
    """Create hosts that reach each other.

    Raises:
        OSError: This machine does not allow a step.
        RuntimeError: This machine does not allow a step.
    """
    with ExitStack() as stack:
        switch, *holders = [stack.enter_context(_namespace()) for _ in range(count + 1)]
        made = Network(switch, holders, ipv6)
        _run(switch, "ip", "link", "add", BRIDGE, "type", "bridge")
        _run(switch, "ip", "link", "set", BRIDGE, "up")
        for host, holder in enumerate(holders):
            port = f"port{host}"
            _run(switch, "ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", str(holder))
            _run(switch, "ip", "link", "set", port, "master", BRIDGE, "up")
            _run(holder, "ip", "link", "set", "lo", "up")
            _run(holder, "ip", "address", "add", *made.interface(host))
            _run(holder, "ip", "link", "set", INTERFACE, "up")
        yield made


@contextmanager
def hosts(net: Network, folder: Path, count: int, **options: Any) -> Iterator[list[Actor]]:
    """Start a worker on each of the first hosts, in one static group over TCP."""
    group: list[Actor] = []
    try:
        for rank in range(count):
            group.append(Actor(rank, folder, net.entrance(rank)))
        joining = [
            actor.begin(
                join,
                actor.name,
                actor.rank,
                count,
                f"file://{folder}/store",
                options | {"transports": ("tcp",), "bind": net.address(actor.rank)},
            )
            for actor in group
        ]
        for step in joining:
            step.result()
        yield group
    finally:
        for actor in group:
            actor.clean_up()


@functools.cache
def missing() -> str | None:
    """Return why such a network cannot be made; None if it can."""
    for tool in ("ip", "iptables", "ss", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian: apt install iproute2 iptables util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with network(1):
            return None
    except (OSError, RuntimeError) as e:
        return f"network namespaces cannot be made: {e}"


@contextmanager
def _namespace() -> Iterator[int]:
    """Yield the id of a process in a new network namespace, which ends after this."""
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            raise RuntimeError(holder.stderr.read().strip())
        try:
            yield holder.pid
        finally:
            holder.stdin.close()
            holder.wait()


def _move(holder: int, host: str) -> None:
    """Enter a namespace, and let the kernel know processes of this host only."""
    enter(holder)
    process_identity._namespace = lambda: host


def _run(namespace: int, *command: str) -> str:
    done = subprocess.run(
        ["nsenter", "-t", str(namespace), "-n", *command], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
