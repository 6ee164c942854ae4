"""Fixtures for tests with workers.

Most tests share a group per module: a call takes microseconds, joining and leaving take milliseconds.
"""

import gc
import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from telegrad import _core
from telegrad.testing import Cluster, assert_quiescent, cluster
from telegrad.worker.serving.thread_pool import ThreadPool

# Processes forked from one that has no threads and has imported everything start in milliseconds.
multiprocessing.get_context("forkserver").set_forkserver_preload(["telegrad.rpc", "telegrad.testing"])


def pytest_configure() -> None:
    """Handle SIGINT, which a shell ignores in background jobs.

    Programs that tests start would ignore it, too.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need OpenSSL if the core is built without it."""
    if _core.openssl_version():
        return
    for item in items:
        if item.get_closest_marker("openssl"):
            item.add_marker(pytest.mark.skip(reason="the core is built without OpenSSL"))


def pytest_collection_finish() -> None:
    """Exempt the objects of imports and collection from garbage collection.

    Many tests collect.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    """Workers w0, which is the current one, and w1; shared by the module's tests."""
    with cluster(2) as group:
        yield group


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    """Workers w0, which is the current one, to w3; shared by the module's tests."""
    with cluster(4) as group:
        yield group


@pytest.fixture
def clean(two: Cluster) -> Iterator[Cluster]:
    """`two`, checked for what this test leaves behind."""
    yield two
    for worker in two:
        assert_quiescent(worker)


@pytest.fixture
def busy_threads() -> Callable[[Cluster], set[threading.Thread]]:
    """Return a function that finds the threads of this process that are in use.

    Pools grow when they like, and so does each worker start its event loop and its timers: a count of all threads
    depends on what ran before. Left out are pool threads that wait for work, and the loops and timers.
    """

    def find(group: Cluster) -> set[threading.Thread]:
        own = {f"telegrad-{worker.info.name}-{what}" for worker in group for what in ("loop", "timers")}
        pools = {thread for worker in group for thread in worker._worker.pool.threads()}
        frames = _core.thread_frames()
        free = {
            thread
            for thread in pools
            if thread.ident in frames and frames[thread.ident].f_code is ThreadPool._serve.__code__
        }
        return {thread for thread in threading.enumerate() if thread not in free and thread.name not in own}

    return find


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test in which Telegrad logs a warning."""
    with caplog.at_level(logging.WARNING, "telegrad"):
        yield
        records = [*caplog.get_records("call"), *caplog.records]
    said = [r.getMessage() for r in records if r.name.startswith("telegrad") and r.levelno >= logging.WARNING]
    assert not said, said
