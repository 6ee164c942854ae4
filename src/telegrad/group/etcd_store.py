"""Groups on etcd: no process of the group is indispensable.

`EtcdStore` is a c10d store, for the rendezvous. `EtcdGroupStore` holds the membership: the log is a range of keys that
transactions extend, leases are those of etcd, and members watch the log.

The address is ``etcd://host:port/group``; several endpoints are separated by commas.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlparse

import torch.distributed as dist

from telegrad.group.addresses import is_loopback
from telegrad.group.etcd_client import EtcdClient, EtcdRefused
from telegrad.group.group_store import log_key
from telegrad.group.store_waits import Store
from telegrad.waits import Wait

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as _Store
else:
    from torch.distributed import Store as _Store

__all__ = ["EtcdGroupStore", "EtcdStore", "endpoints_of"]

_DEFAULT_PORT = 2379
_TIMEOUT = 10.0  # s for one operation; etcd elects a leader within a few
_NO_LEASE = "requested lease not found"  # text of etcd
_MIN_PAUSE, _MAX_PAUSE = 0.005, 0.1  # s between two checks for keys


def endpoints_of(address: str) -> tuple[list[tuple[str, int]], str]:
    """Return the endpoints and the group of an address.

    Raises:
        ValueError: The address is incomplete.
    """
    url = urlparse(address)
    group = url.path.strip("/")
    endpoints = []
    for endpoint in filter(None, url.netloc.split(",")):
        part = urlparse(f"//{endpoint}")
        if not part.hostname:
            break
        endpoints.append((part.hostname, part.port or _DEFAULT_PORT))
    else:
        if endpoints and group:
            return endpoints, group
    raise ValueError(
        f"init_method {address} lacks an endpoint or the name of the group. Write etcd://host:port/group, or"
        " etcd://host1:port,host2:port/group."
    )


class EtcdStore(_Store):
    """c10d store on etcd, for the operations that a rendezvous uses.

    Args:
        address: ``etcd://host:port/group``.
        timeout: Limit of waits for keys.
        wait: Limit and log lines of the wait for etcd to start.

    Raises:
        ValueError: The address is incomplete.
        RuntimeError: No endpoint replies.
    """

    timeout: timedelta  # an attribute of torch's class that its stub lacks

    def __init__(self, address: str, timeout: timedelta, wait: Wait) -> None:
        super().__init__()
        endpoints, group = endpoints_of(address)
        self.set_timeout(timeout)
        self.client: EtcdClient = EtcdClient(endpoints, min(_TIMEOUT, timeout.total_seconds()))
        self.prefix: str = f"telegrad/{group}/"
        self.host: str = endpoints[0][0]  # for messages, and for the address to listen on
        self.port: int = endpoints[0][1]
        self.client.wait_for_reply(wait)

    @property
    def remote_place(self) -> str:
        """Return the endpoints if other machines may read their history, otherwise "".

        Etcd keeps removed values until it is compacted, which is not for one of its clients to do.
        """
        return "" if all(is_loopback(host) for host, _ in self.client.endpoints) else self.client.place

    def make_group_store(self, prefix: str) -> "EtcdGroupStore":
        """Return the membership of the group in a part of this store."""
        return EtcdGroupStore(self.client, self.prefix + prefix)

    def set(self, key: str, value: str | bytes) -> None:
        self.client.put(self.prefix + key, _text(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return (self.client.get(self.prefix + key) or "").encode()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def has_extended_api(self) -> bool:
        return True

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        _, found = self.client.compare_set(self.prefix + key, _text(expected) or None, _text(desired))
        if found is None:  # as in torch's stores
            return _text(expected).encode()
        return found.encode()

    def add(self, key: str, number: int) -> int:
        return self.client.add(self.prefix + key, number)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self.client.get(self.prefix + key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        until = time.monotonic() + (timeout or self.timeout).total_seconds()
        pause = _MIN_PAUSE
        while not self.check(keys):
            left = until - time.monotonic()
            if left <= 0:
                raise dist.DistStoreError(f"etcd has no key {', '.join(keys)} within the timeout")
            time.sleep(min(pause, left))
            pause = min(2 * pause, _MAX_PAUSE)


class EtcdGroupStore:
    """Membership of a group on etcd; see `telegrad.group.group_store.GroupStore`.

    Args:
        client: Client of the cluster.
        prefix: Prefix of the group's keys.
    """

    recovers = True

    def __init__(self, client: EtcdClient, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._leases: dict[str, str] = {}  # lease of etcd, by key

    def get(self, key: str) -> str | None:
        return self._client.get(self._prefix + key)

    def get_all(self, keys: Sequence[str]) -> list[str | None]:
        found = self._client.ranges([(self._prefix + key, "") for key in keys])
        return [values[0][1] if values else None for values in found]

    def set(self, key: str, value: str) -> None:
        self._client.put(self._prefix + key, value)

    def add(self, key: str, number: int) -> int:
        return self._client.add(self._prefix + key, number)

    def compare_set(self, key: str, expected: str | None, desired: str, lifetime: float = 0) -> str | None:
        at = self._prefix + key
        try:
            return self._client.compare_set(at, expected, desired, self._lease(key, lifetime))[1]
        except EtcdRefused as e:
            if not lifetime or _NO_LEASE not in str(e):
                raise
        del self._leases[key]  # it has expired since it was renewed
        return self._client.compare_set(at, expected, desired, self._lease(key, lifetime))[1]

    def _lease(self, key: str, lifetime: float) -> str:
        """Return the lease of etcd for a key, renewed; "0" for none."""
        if not lifetime:
            return "0"
        lease = self._leases.get(key)
        if lease is None or not self._client.keep_alive(lease):
            lease = self._leases[key] = self._client.grant(lifetime)
        return lease

    def append(self, epoch: int, entry: str) -> str:
        _, found = self._client.compare_set(self._log(epoch), None, entry)
        assert found is not None
        return found

    def read(self, epoch: int, keys: Sequence[str] = ()) -> tuple[list[str], list[str | None]]:
        log = self._log(epoch), f"{self._prefix}log0"
        entries, *others = self._client.ranges([log, *((self._prefix + key, "") for key in keys)])
        up_to_a_gap = [value for at, (key, value) in enumerate(entries) if key == self._log(epoch + at)]
        return up_to_a_gap, [values[0][1] if values else None for values in others]

    def forget(self, epochs: range) -> None:
        self._client.delete(self._log(epochs.start), self._log(epochs.stop))

    def watch(self, notify: Callable[[], None]) -> Callable[[], None]:
        return self._client.watch(f"{self._prefix}log/", notify)

    def reconnect(self, timeout: float, is_same: Callable[[Store], bool]) -> bool:
        return True  # the client connects with each request

    def _log(self, epoch: int) -> str:
        return self._prefix + log_key(epoch)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else bytes(value).decode()
