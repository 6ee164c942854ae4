"""Real etcd processes for tests. Debian's package is etcd-server."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from free_ports import free_port

from telegrad.group.etcd_client import EtcdClient, EtcdGone
from telegrad.testing import eventually

MISSING = "etcd is not installed: on Debian, apt install etcd-server"


class Etcd:
    """Process of etcd.

    Args:
        folder: Folder for its data and its output.
        cluster: Name and address for peers of each process of the cluster.
        name: Its own name.
    """

    def __init__(self, folder: Path, cluster: dict[str, str], name: str) -> None:
        self.port = free_port()
        self.name = name
        client, peers = f"http://127.0.0.1:{self.port}", cluster[name]
        self._output = (folder / f"{name}.log").open("wb")
        self.process = subprocess.Popen(
            [
                *("etcd", "--name", name, "--data-dir", str(folder / name), "--log-level", "error"),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
                *("--initial-cluster", ",".join(f"{name}={at}" for name, at in cluster.items())),
                *("--heartbeat-interval", "50", "--election-timeout", "500", "--unsafe-no-fsync")[:4],
            ],
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def is_ready(self) -> bool:
        """Return whether it serves requests."""
        client = EtcdClient([("127.0.0.1", self.port)], 0.5)
        try:
            client.get("any")
        except EtcdGone:
            return False
        finally:
            client.close()
        return True

    def is_leader(self) -> bool:
        """Return whether it leads its cluster."""
        client = EtcdClient([("127.0.0.1", self.port)], 2.0)
        found = client.request("maintenance/status", {})
        client.close()
        return bool(found["leader"] == found["header"]["member_id"])

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.process.kill()
        self.process.wait()
        self._output.close()


@contextmanager
def etcd_cluster(size: int, folder: Path) -> Iterator[list[Etcd]]:
    """Run etcd processes on this host; skip the test if etcd is not installed."""
    if shutil.which("etcd") is None:
        pytest.skip(MISSING)
    names = {f"e{i}": f"http://127.0.0.1:{free_port()}" for i in range(size)}
    with ExitStack() as stack:
        processes = []
        for name in names:
            processes.append(Etcd(folder, names, name))
            stack.callback(processes[-1].kill)
        for process in processes:
            eventually(process.is_ready, timeout=30)
        yield processes


def address_of(cluster: list[Etcd], group: str) -> str:
    """Return the address of a group at a cluster, for `init_method`."""
    return f"etcd://{','.join(f'127.0.0.1:{each.port}' for each in cluster)}/{group}"
