"""Interrupt calls that wait for the window, with deferred completions."""

import signal
import threading

import torch

from telegrad import rpc
from telegrad.rpc import Options
from telegrad.testing import cluster

INTERRUPTS = 30
gate = threading.Event()


class Interrupted(Exception):
    pass


class Armed:
    on = False


def handle(*_: object) -> None:
    if Armed.on:
        Armed.on = False
        raise Interrupted


def wait(_: object) -> None:
    gate.wait()


def identity(x: object) -> object:
    return x


def interrupt_until(done: threading.Event) -> None:
    main = threading.main_thread().ident or 0
    while not done.wait(0.01):
        signal.pthread_kill(main, signal.SIGUSR1)
        if not Armed.on and not done.wait(0.5):
            Armed.on = True  # the exception was lost in a finalizer


def main() -> None:
    signal.signal(signal.SIGUSR1, handle)
    options = Options(num_worker_threads=2, request_window_bytes=1 << 20, rpc_timeout=0)
    with cluster(3, options, check=False, graceful=False) as group:
        large = torch.ones(400_000)
        begun = [rpc.rpc_async("w1", wait, (x,)) for x in (1, 1, large)]  # the window is full
        over = threading.Event()

        def create() -> None:
            with group[0]:
                while not over.is_set():
                    [rpc.remote("w2", identity, (1,)) for _ in range(20)]

        creating = threading.Thread(target=create)
        creating.start()
        for _ in range(INTERRUPTS):
            done = threading.Event()
            interrupting = threading.Thread(target=interrupt_until, args=(done,))
            interrupting.start()
            try:
                Armed.on = True
                rpc.rpc_sync("w1", wait, (large,))
                raise AssertionError("the call has returned")
            except Interrupted:
                pass
            done.set()
            interrupting.join()
        over.set()
        creating.join()
        gate.set()
        del begun
    print("interrupted", INTERRUPTS)


if __name__ == "__main__":
    main()
