"""Arguments of the functions for groups: timeouts, and functions for events."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from telegrad import rpc
from telegrad.errors import ShutdownTimeout
from telegrad.rpc import Options
from telegrad.rpc.api import _all_gather
from telegrad.testing import cluster

SOON = 0.2  # s; of waits that are meant to end
NAN, INF = float("nan"), float("inf")

WAITS: dict[str, Callable[[Any], object]] = {
    "wait_for_worker": lambda timeout: rpc.wait_for_worker("w9", timeout),
    "get_service": lambda timeout: rpc.get_service("none", timeout),
    "all_gather": lambda timeout: rpc.all_gather(1, ["w0", "w1"], timeout),
    "barrier": lambda timeout: rpc.barrier(["w0", "w1"], timeout),
    "broadcast": lambda timeout: rpc.broadcast(1, "w1", ["w0", "w1"], timeout),
    "_all_gather": lambda timeout: _all_gather(1, {"w0", "w1"}, timeout),
}
NOT_NUMBERS = [(NAN, ValueError, "not nan"), ("x", TypeError, "not 'x'"), (None, TypeError, "not None")]
NEGATIVE = [(-0.5, ValueError, "0 or more, not -0.5"), (-2, ValueError, "0 or more, not -2")]


@pytest.mark.parametrize("name", WAITS)
def test_timeouts_of_waits_are_numbers(name: str) -> None:
    """NaN is less than no number, so a wait that does not check it never ends."""
    with cluster(2, graceful=False):
        for timeout, error, text in NOT_NUMBERS + NEGATIVE:
            with pytest.raises(error, match=f"has to be a number of seconds.*{text}"):
                WAITS[name](timeout)


@pytest.mark.parametrize(
    ("timeout", "error", "text"), [*NOT_NUMBERS, (-5, ValueError, "0 or more, not -5"), (-0.5, ValueError, "not -0.5")]
)
def test_invalid_timeout_of_a_shutdown_does_nothing(
    timeout: Any, error: type[Exception], text: str, tmp_path: Any
) -> None:
    with cluster(1) as group:
        for graceful in (True, False):
            with pytest.raises(error, match=text):
                group[0].shutdown(graceful, timeout)
        assert group[0].rpc_sync("w0", abs, (-1,)) == 1
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=Options(init_method=f"file://{tmp_path}/store"))
    with pytest.raises(error, match=text):
        rpc.shutdown(timeout=timeout)
    assert rpc.rpc_sync("w0", abs, (-1,)) == 1
    rpc.shutdown(timeout=INF)


@pytest.mark.parametrize("backend", [None, rpc.backend_registry.BackendType.TENSORPIPE])
def test_options_of_the_environment_need_no_object(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_RPC_TIMEOUT", "7")
    monkeypatch.setenv("TELEGRAD_NUM_WORKER_THREADS", "3")
    rpc.init_rpc("w0", backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        options = rpc.debug_info().options
        assert (rpc.get_rpc_timeout(), options["rpc_timeout"], options["num_worker_threads"]) == (7, 7, 3)
    finally:
        rpc.shutdown()


@pytest.mark.parametrize("timeout", [0, -1, -1.0])
def test_default_timeout_of_a_shutdown_is_the_option(timeout: float) -> None:
    options = Options(shutdown_timeout=SOON)
    with cluster(2, options, check=False, graceful=False) as group, pytest.raises(ShutdownTimeout, match="w1"):
        group[0].shutdown(timeout=timeout)


async def later(*_: object) -> None:
    """Do nothing, in a coroutine."""


@pytest.mark.parametrize("subscribe", [rpc.on_join, rpc.on_leave, rpc.on_lost])
def test_functions_for_events_are_checked(subscribe: Callable[[Any], object]) -> None:
    with cluster(1, dynamic=True) as group:
        for wrong in (5, None, "print"):
            with pytest.raises(TypeError, match=f"for events of the group has to be callable, and {wrong!r} is not"):
                subscribe(wrong)
        with pytest.raises(TypeError, match=r"events of the group .*later is an async def"):
            subscribe(later)
        service = group[0]._worker.membership
        assert service is not None
        assert service.events._functions == {}
