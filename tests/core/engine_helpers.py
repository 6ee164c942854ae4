"""Minimal worker of `_core.Engine` and a few threads, for tests of the engine.

Run as a program, it is such a worker in a separate process and prints a line per event.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from telegrad import _core
from telegrad.wire.layout import WorkKind

ECHO, NEVER, HOLD, FORK, WINDOW = 1, 2, 3, 4, 5
SECOND = 1_000_000_000


class Target(str):
    """Completion target with the id of its call."""

    _call: int


class Native:
    """Engine with `threads` pool threads, and more if the engine requests them."""

    def __init__(
        self, ident: int, *, threads: int = 2, said: Callable[[str], None] = lambda line: None, **options: Any
    ):
        self.ident = ident
        self.said = said
        self.release = threading.Event()
        self.happened = threading.Condition()
        self.completions: list[tuple[Any, tuple[Any, ...]]] = []
        self.events: list[tuple[int, str]] = []
        settings: dict[str, Any] = {
            "incarnation": 1,
            "group": "tests",
            "secret": b"a secret",
            "spin": 50_000,
            "handlers": 16,
            "window": 64 << 20,
            "pool_cache": 1 << 28,
            "handshake_timeout": 10 * SECOND,
            "connect_timeout": 30 * SECOND,
            "heartbeat": 0,
            "local_heartbeat": 0,
            "max_body": 1 << 30,
            "max_message": 1 << 36,
            "shared_memory": 1 << 30,
            "lanes": 4,
            "max_call_depth": 64,
            "max_in_flight": 1 << 16,
            "max_in_flight_bytes": 16 << 30,
            "send_queue": 1 << 30,
            "max_waiting": 1 << 16,
            "arena_budget": 4 << 30,
            "max_peers": 1 << 14,
            "max_unauthenticated": 64,
            "resume": False,
            "check_uid": True,
            "secret_given": False,
            "encrypted": False,
            "certificate": "",
            "private_key": "",
            "authority": "",
            "faults": None,
        }
        self.engine = _core.Engine(id=ident, name=f"w{ident}", **settings | options)
        self.address = self.engine.listen(f"unix:@telegrad-test-{uuid.uuid4().hex}")
        self.threads: list[threading.Thread] = []
        for _ in range(threads):
            self.add_thread()

    def add_thread(self) -> None:
        thread = threading.Thread(target=self.run_pool, daemon=True)
        self.threads.append(thread)
        thread.start()

    def meet(self, ident: int, address: str) -> None:
        self.engine.set_peer(ident, f"w{ident}", 1, [address])

    def call(self, peer: int, tag: int = ECHO, body: bytes = b"", segments: Any = None, timeout: int = 0) -> Any:
        return self.engine.call(peer, tag, 0, 0, None, body, segments, timeout, False, None)

    def start(self, peer: int, target: object, tag: int = ECHO, body: bytes = b"", segments: Any = None) -> int:
        """Send a request without waiting; the completion goes to the pool with its target."""
        to: Any = Target(target) if isinstance(target, str) else target
        self.engine.start_many([peer], tag, 0, 0, None, body, segments, None, [-1], 0, 0, False, [to])
        return getattr(to, "_call", 0)

    def wait_for(self, condition: Callable[[], Any]) -> None:
        with self.happened:
            assert self.happened.wait_for(condition, 30)

    def stop(self) -> None:
        self.release.set()
        self.engine.stop(SECOND)
        for thread in self.threads:
            thread.join()

    def run_pool(self) -> None:
        me = _core.PoolThread()
        while (item := self.engine.next(me)) is not None:
            kind, spawn = item[:2]
            if spawn:
                self.add_thread()
            if kind == WorkKind.EXIT_THREAD:
                return
            if kind == WorkKind.REQUEST:
                self.handle(*item[2:])
            elif kind == WorkKind.COMPLETION:
                self.note(self.completions, item[2:4])
            elif kind == WorkKind.EVENT:
                self.note(self.events, (item[2], item[5]))
            del item

    def note(self, where: list[Any], what: Any) -> None:
        with self.happened:
            where.append(what)
            self.happened.notify_all()

    def handle(
        self,
        peer: int,
        connection: int,
        call: int,
        tag: int,
        flags: int,
        name: Any,
        body: Any,
        segments: Any,
        deadline: int,
    ) -> None:
        self.said(f"handling {tag}")
        if tag == NEVER:
            return
        if tag == HOLD:
            self.release.wait()
        if tag == FORK:
            self.fork()
        self.engine.reply(connection, call, 0, 0, bytes(body), [bytes(s) for s in segments])

    def fork(self) -> None:
        """Fork a child that keeps all inherited resources until standard input ends."""
        if os.fork() == 0:
            sys.stdin.buffer.raw.read()  # type: ignore[attr-defined]
            os._exit(0)


class Child:
    """`Native` in a separate process."""

    def __init__(self, ident: int, *more: str):
        self.ident = ident
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(ident), *more], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.process.pid, how)

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self.process.communicate()


def say(line: str) -> None:
    print(line, flush=True)


def report_when_in_flight(worker: Native, calls: int) -> None:
    while worker.engine.stats()["pending_calls"] < calls:
        time.sleep(0.001)
    say("under way")


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    worker = Native(int(sys.argv[1]), said=say)
    say(worker.address)
    if len(sys.argv) > 2:  # call a peer in the main thread until interrupted
        peer, address, tag, size = int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
        worker.meet(peer, address)
        say(f"connected {worker.call(peer)[0]}")
        sys.stdin.readline()
        threading.Thread(target=report_when_in_flight, args=(worker, 2 if tag == WINDOW else 1), daemon=True).start()
        try:
            if tag == WINDOW:
                worker.start(peer, "target", ECHO, bytes(size))
            say(f"came back {worker.call(peer, ECHO if tag == WINDOW else tag, b'', [bytes(size)])[0]}")
        except KeyboardInterrupt:
            say("interrupted")
        say("alive")
    sys.stdin.read()
    worker.stop()


if __name__ == "__main__":
    main()
