"""Program that exits while its daemon threads and handlers are in Telegrad.

Usage: python exiting_program.py COUNT CASE... It forks COUNT children per case, which run to the exit of the
interpreter, and prints the number of children per case and exit status other than 0.
"""

import asyncio
import atexit
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from telegrad import autograd, rpc
from telegrad.testing import eventually
from telegrad.testing.clusters import HashStore
from telegrad.worker import process_hooks
from telegrad.worker import worker as worker_module

THREADS = 8
AT_ONCE = 6  # children


def echo(x: Any) -> Any:
    return x


async def echo_later(x: Any) -> Any:
    await asyncio.sleep(0)
    return x


def never_returns(x: Any) -> None:
    while True:
        time.sleep(0.0001)


async def never_returns_later(x: Any) -> None:
    never_returns(x)


begun, gate = threading.Event(), threading.Event()


def wait_at_the_gate() -> None:
    gate.wait()


def callback_that_never_returns(x: Any) -> None:
    begun.set()
    never_returns(x)


def callbacks_that_never_return(w0: rpc.Worker) -> object:
    begun.clear()
    gate.clear()
    future = w0.rpc_async("w1", wait_at_the_gate).then(callback_that_never_returns)
    gate.set()  # now that this thread cannot run the callback
    begun.wait()  # before it runs, its thread may wait for the GIL in torch's frames, which must not be unwound
    return future


class Pickled:
    """Value that is pickled and has a finalizer."""

    def __del__(self) -> None:
        sum(range(100))


WEIGHTS = torch.ones(2, requires_grad=True)
LARGE = torch.ones(1 << 16)


def backward(w0: rpc.Worker) -> None:
    with w0, autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("w1", echo, (WEIGHTS,)).sum()])


def awaits(w0: rpc.Worker) -> None:
    async def main() -> None:
        await w0.rpc_async("w1", echo_later, (1,))

    asyncio.run(main())


ROUNDS: dict[str, Callable[[rpc.Worker], object]] = {
    "calls": lambda w0: w0.rpc_sync("w1", echo, (1,)),
    "tensors": lambda w0: w0.rpc_sync("w1", echo, (LARGE,)),
    "pickles": lambda w0: w0.rpc_sync("w1", echo, (Pickled(),)),
    "references": lambda w0: w0.remote("w1", echo, (1,)).to_here(),
    "futures": lambda w0: rpc.wait_all([w0.rpc_async("w1", echo, (i,)) for i in range(4)]),
    "coroutines": awaits,
    "passes": backward,
}
LEFT_BEHIND: dict[str, Callable[[rpc.Worker], object]] = {
    "handlers": lambda w0: w0.rpc_async("w1", never_returns, (1,)),
    "handlers with pickles": lambda w0: w0.rpc_async("w1", never_returns, (Pickled(),)),
    "handlers of references": lambda w0: w0.remote("w1", never_returns, (1,)),
    "async def handlers": lambda w0: w0.rpc_async("w1", never_returns_later, (1,)),
    "callbacks": callbacks_that_never_return,
}


class Slow:
    """Value that delays the exit of the interpreter, for events during it."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(1.0)


def timed_out_at_the_end(w0: rpc.Worker) -> None:
    """Make a call that times out during the exit, before the worker closes."""
    atexit.unregister(process_hooks._close_at_exit)
    w0.rpc_sync("w1", time.sleep, (3600,), timeout=0.5)


DURING_THE_END: dict[str, Callable[[rpc.Worker], object]] = {"calls during the end": timed_out_at_the_end}


def begin(what: str) -> list[Any]:
    """Start threads that never end; return when all are running."""
    store = HashStore()
    other: list[rpc.Worker] = []
    thread = threading.Thread(target=lambda: other.append(rpc.Worker("w1", 1, 2, store=store)))
    thread.start()
    w0 = rpc.Worker("w0", 0, 2, store=store)
    thread.join()
    kept: list[Any] = [w0, other]
    if what in LEFT_BEHIND:
        worker_module._JOIN_TIMEOUT = 0.3
        kept += [LEFT_BEHIND[what](w0) for _ in range(THREADS)]
        w0.rpc_sync("w1", echo, (1,))
        return kept
    if what in DURING_THE_END:
        threading.Thread(target=DURING_THE_END[what], args=(w0,), daemon=True).start()
        eventually(lambda: w0._worker.engine.stats()["pending_calls"] > 0)
        return [*kept, Slow()]
    at_it = threading.Semaphore(0)

    def run() -> None:
        while True:
            try:
                ROUNDS[what](w0)
            except RuntimeError:
                return  # the worker has been closed
            finally:
                at_it.release()

    for _ in range(THREADS):
        threading.Thread(target=run, daemon=True).start()
    for _ in range(4 * THREADS):
        at_it.acquire()
    return kept


def fork(cases: list[str]) -> str | None:
    """Fork a child per case; return its case in a child."""
    failed: Counter[tuple[str, int]] = Counter()
    running: dict[int, str] = {}

    def wait_for_one() -> None:
        pid, status = os.wait()
        case, code = running.pop(pid), os.waitstatus_to_exitcode(status)
        if code:
            failed[case, code] += 1

    for case in cases:
        pid = os.fork()
        if not pid:
            return case
        running[pid] = case
        if len(running) == AT_ONCE:
            wait_for_one()
    while running:
        wait_for_one()
    print(dict(failed))
    return None


if __name__ == "__main__" and (case := fork(sys.argv[2:] * int(sys.argv[1]))):
    keep = begin(case)
