"""Threads that end with their test."""

import threading
from collections.abc import Callable
from typing import Any

import pytest


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
