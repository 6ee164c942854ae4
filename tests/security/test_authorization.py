"""Interceptors of a callee that refuse requests, and members that bypass them."""

from typing import Any

import pytest
from trust_helpers import double, later

from telegrad import rpc
from telegrad.testing import Cluster


def refuse(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> Any:
    raise PermissionError(f"{call.peer} may not call {call.name}")


def in_the_group(rank: int) -> object:
    rpc.barrier()
    return rpc.all_gather(rank), rpc.broadcast(rank, "w0")


@pytest.mark.parametrize("function", [double, later], ids=lambda f: f.__name__)
def test_requests_with_the_flag_of_internal_calls_are_intercepted(group: Cluster, function: Any) -> None:
    with group[1], rpc.intercept(server=refuse):
        hostile = group[0]._worker
        with pytest.raises(PermissionError, match=f"w0 may not call {function.__name__}"):
            hostile.start_internal(1, function, (2,), 10.0).wait()


def test_internal_calls_are_not_intercepted(group: Cluster) -> None:
    rref = rpc.remote("w1", double, (2,))
    rref.to_here()  # it exists before there are interceptors
    with group[1]:
        rpc.register_service("counter", 5)
    with group[0], rpc.intercept(server=refuse), group[1], rpc.intercept(server=refuse):
        values = {"w0": 0, "w1": 1}
        assert group.on_each(in_the_group) == [(values, 0)] * 2
        with group[0]:
            assert rpc.get_service("counter").owner_name() == "w1"
            assert rref._get_type() is int
