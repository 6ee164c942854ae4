"""Time until faults are noticed, and the cost of unauthenticated connections."""

import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bench.reliability.actors import Actor, group
from telegrad import rpc

HEARTBEAT = 1.0  # s, of the measurement of silence
FLOOD = 300  # connections that stay open, and new ones per second at most


class Rounds(NamedTuple):
    """Result of a measurement."""

    values: list[float]
    note: str = ""


def hang() -> None:
    threading.Event().wait()


def wait_for_loss(to: str) -> tuple[float, str]:
    """Return when a call without a timeout failed, and its error."""
    rpc.rpc_sync(to, abs, args=(-1,))
    try:
        rpc.rpc_sync(to, hang, timeout=0)
    except Exception as e:
        return time.monotonic(), type(e).__name__
    raise RuntimeError("a call of a function that does not return has returned")


def noticed(caller: Actor, victim: Actor, name: str, number: int) -> float:
    """Return the seconds from a signal to the failure of a call to its receiver."""
    caller.begin(wait_for_loss, name)
    time.sleep(0.3)  # until the call waits
    at = victim.send_signal(number)
    failed, error = caller.result()
    if error != "WorkerLost":
        raise RuntimeError(f"a call of a lost worker failed with {error}")
    return float(failed - at)


def local_kill(rounds: int) -> Rounds:
    """Return the seconds until a call to a killed worker of the host fails."""
    result = []
    with group() as workers:
        caller, _ = workers.join("caller")
        for n in range(rounds):
            victim, _ = workers.join(f"victim{n}")
            result.append(noticed(caller, victim, f"victim{n}", signal.SIGKILL))
    return Rounds(result)


def remote_silence(rounds: int) -> Rounds:
    """Return the heartbeats until a call to a stopped worker fails, over TCP."""
    result = []
    with group(transports=("tcp",), heartbeat=HEARTBEAT) as workers:
        caller, _ = workers.join("caller")
        for n in range(rounds):
            victim, _ = workers.join(f"victim{n}")
            result.append(noticed(caller, victim, f"victim{n}", signal.SIGSTOP) / HEARTBEAT)
            victim.send_signal(signal.SIGKILL)
    return Rounds(result)


def join_next_to_a_stopped_member(rounds: int) -> Rounds:
    """Return the seconds of joins while a member is stopped, with default options."""
    result = []
    for _ in range(rounds):
        with group() as workers:
            workers.join("first")
            stopped, _ = workers.join("stopped")
            newcomer = workers.start()
            newcomer.do(abs, -1)  # the process runs
            stopped.send_signal(signal.SIGSTOP)
            result.append(workers.join("newcomer", newcomer)[1])
    return Rounds(result)


def tcp_address() -> tuple[str, int]:
    worker = rpc.api._get_current_rpc_agent().worker
    host, _, port = next(a for a in worker.member.addresses if a.startswith("tcp:"))[4:].rpartition(":")
    return host, int(port)


def median_of_calls(to: str, seconds: float) -> float:
    durations = []
    end = time.monotonic() + seconds
    while (begun := time.monotonic()) < end:
        rpc.rpc_sync(to, abs, args=(-1,))
        durations.append(time.monotonic() - begun)
    return statistics.median(durations)


class Flood:
    """Unauthenticated connections to a worker: silent ones, and ones that send HTTP."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._number = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End the flood; return how many connections it has made."""
        self._stopping.set()
        self._thread.join()
        return self._number

    def _run(self) -> None:
        silent: list[socket.socket] = []
        while not self._stopping.wait(1 / FLOOD):
            try:
                one = socket.create_connection(self._address, timeout=1)
                self._number += 1
                if self._number % 2:
                    one.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
                    one.close()
                else:
                    silent.append(one)
            except OSError:
                continue
            if len(silent) > FLOOD:
                silent.pop(0).close()
        for one in silent:
            one.close()


_flood: list[Flood] = []


def begin_flood(address: tuple[str, int]) -> None:
    _flood.append(Flood(address))
    time.sleep(0.2)


def end_flood() -> int:
    return _flood.pop().stop()


def unauthenticated_flood(rounds: int) -> Rounds:
    """Return how much slower calls are while others connect to the callee, in pairs."""
    ratios, connections, seconds = [], 0, 0.0
    with group(transports=("tcp",)) as workers:
        caller, _ = workers.join("caller")
        callee, _ = workers.join("callee")
        flooder = workers.start()
        address = callee.do(tcp_address)
        for n in range(rounds + 1):
            quiet = caller.do(median_of_calls, "callee", 1.0)
            begun = time.monotonic()
            flooder.do(begin_flood, address)
            flooded = caller.do(median_of_calls, "callee", 1.0)
            connections += flooder.do(end_flood)
            seconds += time.monotonic() - begun
            if n > 0:  # the first pair warms up
                ratios.append(flooded / quiet)
    return Rounds(ratios, f"{connections / seconds:.0f} connections per second")


MEASUREMENTS: dict[str, tuple[Callable[[int], Rounds], int, str, float]] = {
    "local kill": (local_kill, 10, "s", 0.1),
    "remote silence": (remote_silence, 5, "heartbeats", 3.0),
    "join next to a stopped member": (join_next_to_a_stopped_member, 5, "s", 2.0),
    "unauthenticated flood": (unauthenticated_flood, 12, "times as long", 1.15),
}
"""Function, rounds, unit and goal. The worst round has to reach the goal; of the flood, the median of the pairs."""


def measure(rounds: int | None = None) -> dict[str, Any]:
    result = {}
    for name, (function, usual, unit, goal) in MEASUREMENTS.items():
        values, note = function(rounds or usual)
        decisive = statistics.median(values) if unit == "times as long" else max(values)
        result[name] = {
            "rounds": len(values),
            "unit": unit,
            "note": note,
            "median": round(statistics.median(values), 4),
            "worst": round(max(values), 4),
            "goal": goal,
            "met": decisive < goal if unit != "times as long" else decisive <= goal,
        }
    return result
