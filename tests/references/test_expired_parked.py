"""Requests that wait for a reference and whose time is over before it is ready."""

import pytest

from telegrad import rpc
from telegrad.errors import Cancelled, RpcTimeout
from telegrad.testing import Cluster, Gate, Local, eventually

pytestmark = pytest.mark.usefixtures("quiet")


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls


def make(gate: Local[Gate]) -> Counter:
    gate.value.enter()
    return Counter()


@pytest.mark.parametrize("end", ["deadline", "cancel"])
def test_a_parked_request_does_not_run_after_its_end(clean: Cluster, end: str) -> None:
    gate = Gate()
    rref = rpc.remote("w1", make, (local := Local(gate),))
    gate.wait_for()
    call = rref.rpc_async(timeout=1 if end == "deadline" else 0).count()
    eventually(lambda: clean[1].debug_info().counts.parked_requests == 1)
    if end == "cancel":
        assert call.cancel()
    with pytest.raises(RpcTimeout if end == "deadline" else Cancelled):
        call.wait()
    gate.open()
    assert rref.rpc_sync().count() == 1
    eventually(lambda: clean[1].debug_info().counts.parked_requests == 0)
    del local
