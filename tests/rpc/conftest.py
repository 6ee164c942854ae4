"""Threads that end with their test, records of chunks, and checks of interceptors."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from map_helpers import mapping

from telegrad.rpc import chunks
from telegrad.testing import Cluster
from telegrad.worker.calls import interceptors


@pytest.fixture
def in_thread() -> Any:
    """Return a function that runs its argument in a thread joined after the test."""
    threads = []

    def begin(function: Callable[[], Any]) -> threading.Thread:
        thread = threading.Thread(target=function, daemon=True)
        threads.append(thread)
        thread.start()
        return thread

    yield begin
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def chunk_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of items of the chunks that arrive."""
    sizes: list[int] = []
    original = chunks.run_chunk

    def run_chunk(function: Any, items: list[Any], caller: int) -> Any:
        sizes.append(len(items))
        return original(function, items, caller)

    run_chunk.__module__, run_chunk.__qualname__ = chunks.__name__, "run_chunk"
    monkeypatch.setattr(chunks, "run_chunk", run_chunk)
    monkeypatch.setattr(mapping, "run_chunk", run_chunk)
    return sizes


@pytest.fixture
def no_interceptors_left(two: Cluster) -> Iterator[None]:
    """Check that a test has removed its interceptors."""
    yield
    assert not interceptors.active
    for worker in two:
        assert not worker._worker.handlers.interceptors.chain
