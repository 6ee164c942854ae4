"""Picklers that are removed while calls have begun."""

from collections.abc import Iterator
from typing import Any

import pytest
from pickler_helpers import Plain

from telegrad import rpc
from telegrad.errors import RemoteError
from telegrad.testing import Cluster, Gate

pytestmark = [pytest.mark.usefixtures("clean")]


class First(Plain):
    pass


class OfTheCallee(First):
    pass


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.mark.parametrize("callees", [First, OfTheCallee])
@pytest.mark.parametrize("retry", [None, rpc.Retry()], ids=["call", "retry"])
def test_calls_that_have_begun_use_the_removed_pickler(two: Cluster, gate: Gate, callees: Any, retry: Any) -> None:
    with two[1]:
        of_callee = rpc.use_pickler(callees())
    with of_callee:
        with rpc.use_pickler(First()):
            future = rpc.rpc_async("w1", gate.enter, ("value",), retry=retry)
            gate.wait_for()
        gate.open()
        assert future.wait() == "value"


def test_requests_of_further_calls_do_not_use_the_removed_pickler(two: Cluster) -> None:
    with two[1], rpc.use_pickler(First()):
        pass
    with rpc.use_pickler(First()), pytest.raises(RemoteError, match="this worker uses no pickler"):
        rpc.rpc_sync("w1", max, (1, 2))
