"""Client of etcd, with the standard library.

It uses the JSON gateway of version 3 of the API. Requests go to one of the endpoints. If it fails, the client tries the
next one, so the loss of one etcd process delays a request by the time in which etcd elects a leader. A write that may
have been carried out is safe to repeat: it is either idempotent or conditional, and the caller checks the value
afterwards.
"""

import base64
import http.client
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from telegrad.waits import Wait

__all__ = ["EtcdClient", "EtcdGone", "EtcdRefused", "b64", "text"]

logger: logging.Logger = logging.getLogger("telegrad")

EtcdGone: type[RuntimeError] = dist.DistNetworkError
"""Error of an operation after no endpoint replied in time."""


class EtcdRefused(RuntimeError):
    """Etcd has refused a request, and would refuse it again."""


_TRANSIENT = (408, 429, 499)  # HTTP statuses of refusals that may not be repeated: timeout, overload, canceled
_REQUEST_TIMEOUT = 2.0  # s for one endpoint to reply; etcd elects a leader within about 1 s
_PAUSE = 0.1  # s between two rounds over all endpoints
_MAX_READS = 100  # of a request; etcd allows 128 by default
_LONG = 4096  # characters of a value that is compared by its revision: etcd limits the size of a request
_WATCH_TIMEOUT = 600.0  # s until an idle watch begins again


def b64(value: str | bytes) -> str:
    """Return a key or value as the gateway expects it."""
    return base64.b64encode(value.encode(errors="surrogateescape") if isinstance(value, str) else value).decode()


def text(value: str) -> str:
    """Return the text of a key or value of the gateway."""
    return base64.b64decode(value).decode(errors="surrogateescape")


class EtcdClient:
    """Connection to an etcd cluster. Any thread may use it.

    Args:
        endpoints: Hosts and ports, at least one.
        timeout: Limit in seconds for an operation, over all endpoints.
    """

    def __init__(self, endpoints: list[tuple[str, int]], timeout: float) -> None:
        self.endpoints = endpoints
        self.timeout = timeout
        self._at = 0  # index of the endpoint in use
        self._failure = ""  # of the last request that failed
        self._lock = threading.Lock()
        self._open: list[http.client.HTTPConnection] = []  # at most one
        # Also closes it if a reference cycle kept the client alive, as that of an exception and its traceback.
        weakref.finalize(self, _close_all, self._open)

    @property
    def place(self) -> str:
        """Return the endpoints for messages."""
        return ",".join(f"{host}:{port}" for host, port in self.endpoints)

    def request(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request, to the next endpoint if one fails.

        Raises:
            EtcdGone: No endpoint has replied within the timeout.
            EtcdRefused: Etcd has refused the request.
        """
        return self._request(path, body, self.timeout)

    def wait_for_reply(self, wait: Wait) -> None:
        """Wait until an endpoint replies: the cluster may start later than its clients.

        Args:
            wait: Limit and log lines of the wait.

        Raises:
            EtcdGone: No endpoint has replied in time.
            EtcdRefused: Etcd has refused a read.
        """
        while True:
            try:
                self._request("kv/range", {"key": b64("telegrad")}, min(self.timeout, wait.pause()))
            except EtcdGone as e:
                if not wait.left:
                    raise self._gone(wait.timeout) from e
                wait.step(lambda: (f"etcd at {self.place}", self._failure))
            else:
                return

    def _gone(self, seconds: float) -> RuntimeError:
        return EtcdGone(
            f"etcd at {self.place} did not reply within {seconds:g} s: {self._failure}. Is it running, and can this"
            " host reach it?"
        )

    def _request(self, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        until = time.monotonic() + timeout
        failure = ""
        with self._lock:
            while True:
                for _ in self.endpoints:
                    limit = min(_REQUEST_TIMEOUT, max(until - time.monotonic(), 0.05))
                    try:
                        return self._send(path, body, limit)
                    except (OSError, http.client.HTTPException, ValueError) as e:
                        if not (failure and isinstance(e, TimeoutError) and limit < _REQUEST_TIMEOUT):
                            self._failure = failure = str(e) or type(e).__name__
                        _close_all(self._open)
                        self._at = (self._at + 1) % len(self.endpoints)
                if time.monotonic() >= until:
                    raise self._gone(timeout)
                time.sleep(_PAUSE)

    def _send(self, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        if not self._open:
            self._open.append(http.client.HTTPConnection(*self.endpoints[self._at], timeout=timeout))
        connection = self._open[0]
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        connection.request("POST", f"/v3/{path}", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        if response.status != http.HTTPStatus.OK:
            said = f"{response.status}: {_reason(content)}"
            if 400 <= response.status < 500 and response.status not in _TRANSIENT:
                raise EtcdRefused(f"etcd at {self.place} refused a request ({path}) with {said}")
            raise OSError(f"etcd replied {said}")
        found: dict[str, Any] = json.loads(content)
        return found

    def close(self) -> None:
        """Close the connection; a later request opens another."""
        with self._lock:
            _close_all(self._open)

    # ---- operations

    def get(self, key: str) -> str | None:
        """Return the value of a key, or None."""
        return self._get_with_revision(key)[0]

    def _get_with_revision(self, key: str) -> tuple[str | None, str | None]:
        """Return the value of a key and the revision that has written it, or None."""
        found = self.request("kv/range", {"key": b64(key)}).get("kvs")
        return (text(found[0].get("value", "")), str(found[0]["mod_revision"])) if found else (None, None)

    def ranges(self, ranges: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
        """Return keys and values of ranges, each in the order of its keys.

        The ranges are read in the given order.

        Args:
            ranges: First key of each range, and the key after its last one; "" for the first key alone.
        """
        order = {"sort_order": "ASCEND", "sort_target": "KEY"}
        reads = [{"request_range": {"key": b64(first), "range_end": b64(end), **order}} for first, end in ranges]
        found = []
        for at in range(0, len(reads), _MAX_READS):
            found += self.request("kv/txn", {"success": reads[at : at + _MAX_READS]})["responses"]
        pairs = [each["response_range"].get("kvs", []) for each in found]
        return [[(text(kv["key"]), text(kv.get("value", ""))) for kv in kvs] for kvs in pairs]

    def put(self, key: str, value: str) -> None:
        """Write a key."""
        self.request("kv/put", {"key": b64(key), "value": b64(value)})

    def delete(self, first: str, end: str) -> None:
        """Delete a range of keys."""
        self.request("kv/deleterange", {"key": b64(first), "range_end": b64(end)})

    def compare_set(self, key: str, expected: str | None, desired: str, lease: str = "0") -> tuple[bool, str | None]:
        """Write a key if it has the expected value, or none.

        Returns:
            Whether this request has written it, and its value. Another client may have written the same value, and so
            may an earlier request of this one without a reply.
        """
        condition: dict[str, object] = {"key": b64(key), "result": "EQUAL"}
        revision = None
        if expected is not None and len(expected) > _LONG:
            found, revision = self._get_with_revision(key)
            if found != expected:
                return False, found
        if revision is not None:
            condition |= {"target": "MOD", "mod_revision": revision}
        elif expected is None:
            condition |= {"target": "CREATE", "create_revision": "0"}
        else:
            condition |= {"target": "VALUE", "value": b64(expected)}
        put = {"request_put": {"key": b64(key), "value": b64(desired), "lease": lease}}
        done = self.request(
            "kv/txn", {"compare": [condition], "success": [put], "failure": [{"request_range": {"key": b64(key)}}]}
        )
        if done.get("succeeded"):
            return True, desired
        kvs = done["responses"][0]["response_range"].get("kvs")
        return False, text(kvs[0].get("value", "")) if kvs else None

    def add(self, key: str, number: int) -> int:
        """Add to a counter. If a reply is lost, the counter may skip a value."""
        while True:
            before = self.get(key)
            wanted = int(before or 0) + number
            if self.compare_set(key, before, str(wanted))[0]:
                return wanted

    def grant(self, seconds: float) -> str:
        """Return a new lease."""
        return str(self.request("lease/grant", {"TTL": str(max(round(seconds), 1))})["ID"])

    def keep_alive(self, lease: str) -> bool:
        """Renew a lease; return False if it has expired."""
        found = self.request("lease/keepalive", {"ID": lease}).get("result", {})
        return int(found.get("TTL", 0)) > 0

    def watch(self, prefix: str, notify: Callable[[], None]) -> Callable[[], None]:
        """Call a function on a new thread whenever a key with a prefix is written.

        Returns:
            A function that ends the watch.
        """
        watch = _Watch(self, prefix, notify)
        threading.Thread(target=watch.run, name="telegrad-etcd-watch", daemon=True).start()
        return watch.stop


class _Watch:
    """Watch of one prefix, with a connection of its own."""

    def __init__(self, client: EtcdClient, prefix: str, notify: Callable[[], None]) -> None:
        self._client = client
        self._prefix = prefix
        self._notify = notify
        self._stopped = threading.Event()
        self._connection: http.client.HTTPConnection | None = None

    def stop(self) -> None:
        self._stopped.set()
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(2)  # wakes the thread

    def run(self) -> None:
        at = 0
        while not self._stopped.is_set():
            try:
                for _ in self._events(self._client.endpoints[at]):
                    self._notify()
            except (OSError, http.client.HTTPException, ValueError, AttributeError) as e:
                logger.debug("a watch at etcd begins again: %s", e)
            at = (at + 1) % len(self._client.endpoints)
            self._stopped.wait(_PAUSE)

    def _events(self, endpoint: tuple[str, int]) -> Iterator[None]:
        """Yield when the watch has begun, and for each change."""
        end = self._prefix[:-1] + chr(ord(self._prefix[-1]) + 1)
        connection = http.client.HTTPConnection(*endpoint, timeout=_WATCH_TIMEOUT)
        self._connection = connection
        try:
            create = {"create_request": {"key": b64(self._prefix), "range_end": b64(end)}}
            connection.request("POST", "/v3/watch", json.dumps(create), {"Content-Type": "application/json"})
            response = connection.getresponse()
            while not self._stopped.is_set() and response.readline():
                yield
        finally:
            self._connection = None
            connection.close()


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    while connections:
        connections.pop().close()


def _reason(content: bytes) -> str:
    with suppress(ValueError, AttributeError):
        return str(json.loads(content).get("error", ""))
    return content[:200].decode(errors="replace")
