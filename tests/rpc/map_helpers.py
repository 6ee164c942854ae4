"""Functions that the tests of `rpc.map` use."""

import asyncio
import sys
from typing import Any

from telegrad import rpc

mapping = sys.modules["telegrad.rpc.map"]


def identity(x: Any) -> Any:
    return x


def me(_: object) -> str:
    return rpc.get_worker_info().name


def invert(x: int) -> float:
    return 1 / x


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


async def later(x: int) -> int:
    await asyncio.sleep(0)
    if x == 7:
        raise KeyError(x)
    return x + 1
