"""Waits for futures, in coroutines and threads."""

import asyncio
import threading
from collections.abc import Awaitable, Generator
from typing import Any, TypeVar

import torch

from telegrad.waits import wait_for

__all__ = ["awaitable_of", "wait_done", "wait_in_loop"]

T = TypeVar("T")


def wait_in_loop(future: torch.futures.Future[Any]) -> Generator[Any, None, None]:
    """Suspend the running task until a future is done."""
    loop = asyncio.get_running_loop()
    waiting = loop.create_future()

    def wake(_: object) -> None:
        if not waiting.done():
            waiting.set_result(None)

    def finished(done: object) -> None:
        try:
            loop.call_soon_threadsafe(wake, done)
        except RuntimeError:  # the loop has closed: no task awaits this future
            pass

    torch._C.Future.add_done_callback(future, finished)
    yield from waiting.__await__()


def wait_done(future: torch.futures.Future[Any]) -> None:
    """Wait until a future is done.

    An exception of a signal handler ends the wait, unlike that of torch itself.
    """
    if future.done():
        return
    done = threading.Event()
    torch._C.Future.add_done_callback(future, lambda _: done.set())
    wait_for(done)


class _Awaitable(Awaitable[T]):
    def __init__(self, future: torch.futures.Future[T]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, T]:
        yield from wait_in_loop(self._future)
        return self._future.value()


def awaitable_of(future: torch.futures.Future[T]) -> Awaitable[T]:
    """Return an awaitable of any future; futures of torch itself have no ``await``."""
    return future if isinstance(future, Awaitable) else _Awaitable(future)
