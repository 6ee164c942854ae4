"""A member of the soak: a process with threads that work, and a pipe to the soak."""

import gc
import logging
import os
import random
import re
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process imports it, for seconds

from bench.soak.operations import OPERATIONS, Choice, Wrong
from bench.soak.resources import in_use
from telegrad import rpc
from telegrad.group import addresses
from telegrad.rpc import Options
from telegrad.testing import LeakError, assert_quiescent

REPORT_EVERY = 0.5  # s
LOG_FORMAT = "%(asctime)s %(process)d %(message)s"
LEAVE_TIMEOUT = 30.0  # s


@dataclass(frozen=True)
class Assignment:
    """Name, work and options of a member."""

    name: str
    seed: int
    threads: int
    options: dict[str, Any]


class Member:
    def __init__(self, connection: Connection, assignment: Assignment) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._assignment = assignment
        self._lock = threading.Lock()
        self._done: Counter[str] = Counter()
        self._failed: list[tuple[Any, ...]] = []
        self._wrong: list[str] = []
        self._running: dict[int, tuple[str, tuple[str, ...], float]] = {}
        self._stopping = threading.Event()
        self._drivers = [threading.Thread(target=self._drive, args=(n,)) for n in range(assignment.threads)]
        self._reporter = threading.Thread(target=self._report_often, daemon=True)

    def run(self) -> None:
        self._expose_port()
        begun = time.monotonic()
        rpc.init_rpc(self._assignment.name, rpc_backend_options=Options(**self._assignment.options))
        self._send("joined", time.monotonic() - begun)
        for thread in (*self._drivers, self._reporter):
            thread.start()
        while (order := self._connection.recv()) != "end":
            if order == "stop":
                self._stopping.set()
                for thread in self._drivers:
                    thread.join()
                self._report()
                self._send("stopped")
            elif order == "check":
                self._send("checked", self._left_behind())
            elif order == "leave":
                rpc.shutdown(timeout=LEAVE_TIMEOUT)
                self._send("left")

    def _send(self, *message: Any) -> None:
        with self._sending:
            self._connection.send(message)

    def _expose_port(self) -> None:
        """Publish the port of the proxy instead of the member's own."""
        publish = addresses.advertised

        def advertised(bound: list[str], options: Options, store_at: str) -> list[str]:
            found = publish(bound, options, store_at)
            for number, address in enumerate(found):
                head, _, port = address.rpartition(":")
                if address.startswith(("tcp:", "tls:")):
                    self._send("expose", int(port))
                    found[number] = f"{head}:{self._connection.recv()}"
            return found

        addresses.advertised = advertised

    def _drive(self, number: int) -> None:
        chooser = random.Random(f"{self._assignment.seed} {self._assignment.name} {number}")
        kinds, weights = list(OPERATIONS), [weight for _, weight in OPERATIONS.values()]
        while not self._stopping.is_set():
            others = [info.name for info in rpc.api._get_current_rpc_agent().get_worker_infos()]
            others = sorted(set(others) - {self._assignment.name})
            if not others:
                self._stopping.wait(0.1)
                continue
            kind = chooser.choices(kinds, weights)[0]
            self._operate(number, kind, Choice(chooser.sample(others, min(2, len(others))), chooser))

    def _operate(self, number: int, kind: str, choice: Choice) -> None:
        members, begun = (self._assignment.name, *choice.peers), time.monotonic()
        self._running[number] = kind, members, begun
        try:
            OPERATIONS[kind][0](choice)
        except Wrong as e:
            with self._lock:
                self._wrong.append(f"{kind} of {members}: {e}")
        except Exception as e:
            text = f"{e}\n{traceback.format_exc(limit=-4)}"[:2000]
            with self._lock:
                self._failed.append((kind, members, begun, time.monotonic(), type(e).__name__, text))
            self._stopping.wait(0.02)  # a lost peer fails calls at once
        else:
            with self._lock:
                self._done[kind] += 1
        finally:
            self._running.pop(number, None)

    def _report_often(self) -> None:
        while not self._stopping.wait(REPORT_EVERY):
            self._report()

    def _report(self) -> None:
        with self._lock:
            content = dict(self._done), self._failed, self._wrong
            self._done, self._failed, self._wrong = Counter(), [], []
        self._send("report", *content, list(self._running.values()), in_use())

    def _left_behind(self) -> str:
        gc.collect()
        try:
            assert_quiescent(rpc.api._get_current_rpc_agent().worker, timeout=10)
        except LeakError as e:
            found = re.sub(r"\d+ strays of references(, )?", "", str(e))  # lost peers leave some
            return "" if found.endswith("has left: ") else found
        return ""


def run(connection: Connection, assignment: Assignment) -> None:
    """Be a member until the program that watches ends."""
    torch.set_num_threads(1)
    logging.basicConfig(level=os.environ.get("TELEGRAD_SOAK_LOG", "WARNING"), format=LOG_FORMAT)
    try:
        Member(connection, assignment).run()
    except EOFError:
        os._exit(1)  # the watching program has ended
