"""Functions that the tests call remotely, and questions about profiles."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import profiler_legacy

from telegrad import rpc

MANY, FEW = 50, 10  # the core gives Python a plain request too when it wants another thread


def events(profile: Any) -> list[Any]:
    found = profile.events() if hasattr(profile, "events") else profile.function_events
    return list(found)


def named(profile: Any, name: str) -> list[Any]:
    return [event for event in events(profile) if event.name == name]


def only(profile: Any, name: str) -> Any:
    found = named(profile, name)
    assert len(found) == 1, (name, sorted({event.name for event in events(profile)}))
    return found[0]


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def fail(x: torch.Tensor) -> None:
    double(x)
    raise ValueError("on purpose")


def relay(to: str, x: torch.Tensor) -> Any:
    return rpc.rpc_sync(to, double, (x,))


@rpc.functions.async_execution
def relay_later(to: str, x: torch.Tensor) -> Any:
    return rpc.rpc_async(to, double, (x,)).then(lambda done: torch.mul(done.value(), 3))


@rpc.functions.async_execution
def never() -> Any:
    return torch.futures.Future()


async def relay_in_coroutine(to: str, x: torch.Tensor) -> Any:
    before = torch.mul(x, 3)
    after = await rpc.rpc_async(to, double, (x,))
    return torch.sub(before, after)


def profile_yourself(x: torch.Tensor) -> list[str]:
    double(x)
    with profiler_legacy.profile() as inner:
        torch.mul(x, x)
    torch.sub(x, x)
    return [event.name for event in events(inner)]


def doubles(x: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    for _ in range(count):
        yield double(x)


class Box:
    def __init__(self) -> None:
        self.content = torch.ones(2)

    def get(self) -> torch.Tensor:
        return self.content + 1

    def copies(self, count: int) -> Iterator[torch.Tensor]:
        for _ in range(count):
            yield torch.mul(self.content, 1)
