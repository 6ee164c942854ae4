"""Shutdowns of a worker that is shutting down."""

import signal
import threading

import pytest

from telegrad.errors import NotInitialized, ShutdownTimeout, TelegradError
from telegrad.testing import cluster, eventually


def test_the_limit_of_a_shutdown_includes_the_wait_for_another_one() -> None:
    with cluster(2, graceful=False) as w:
        gave_up = threading.Event()

        def end() -> None:
            with pytest.raises(NotInitialized):
                w[0].shutdown()
            gave_up.set()

        hangs = threading.Thread(target=end)
        hangs.start()
        eventually(lambda: w[0]._worker.shutdown_lock.locked())
        with pytest.raises(ShutdownTimeout):
            w[0].shutdown(timeout=0.2)
        assert gave_up.wait(10)
        hangs.join()
        assert w[0]._worker.closed


def test_a_signal_handler_cannot_wait_for_the_shutdown_that_it_interrupts() -> None:
    def on_signal(*_: object) -> None:
        w[0].shutdown(timeout=1)

    with cluster(2, graceful=False) as w:
        main = threading.main_thread().ident or 0

        def interrupt() -> None:
            eventually(lambda: w[0]._worker.shutdown_lock.locked())
            signal.pthread_kill(main, signal.SIGUSR1)

        interrupts = threading.Thread(target=interrupt)
        before = signal.signal(signal.SIGUSR1, on_signal)
        try:
            interrupts.start()
            with pytest.raises(TelegradError, match=r"it would wait for itself\. Leave at once"):
                w[0].shutdown()
        finally:
            signal.signal(signal.SIGUSR1, before)
            interrupts.join()
        assert w[0]._worker.closed
