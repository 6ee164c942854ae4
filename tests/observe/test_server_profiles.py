"""A server's profile has all requests of its process, from every caller."""

import pickle
import threading
from typing import Any

import pytest
import torch
from profile_helpers import FEW, MANY, double, relay_in_coroutine
from torch.autograd import profiler_legacy

from telegrad import observe, rpc
from telegrad.compat import rpc as compat_rpc
from telegrad.errors import SerializationError
from telegrad.testing import Cluster, eventually, run_all
from telegrad.worker.calls import interceptors, tracing

X = torch.ones(2)


def names(profile: Any) -> list[str]:
    return [event.name for event in profile.function_events]


def test_every_request_is_recorded_in_all_active_profiles() -> None:
    with observe.ServerProfile() as outer:
        rpc.rpc_sync("w1", torch.add, (X, X))
        with observe.ServerProfile() as inner:
            rpc.rpc_sync("w1", torch.sub, (X, X))
        rpc.rpc_sync("w1", torch.mul, (X, X))
    rpc.rpc_sync("w1", torch.div, (X, X))
    assert names(inner) == ["aten::sub"]
    assert names(outer) == ["aten::add", "aten::sub", "aten::mul"]
    assert [[event.name for event in events] for events in outer.process_global_function_events] == [
        ["aten::add"],
        ["aten::sub"],
        ["aten::mul"],
    ]
    assert "aten::sub" in outer.key_averages().table()


def test_callers_of_all_threads_and_coroutines_are_in_it(three: Cluster) -> None:
    with observe.ServerProfile(record_shapes=True) as profile:
        run_all([lambda: three[0].rpc_sync("w1", double, (X,)), lambda: three[2].rpc_sync("w1", double, (X,))])
        rpc.rpc_sync("w1", relay_in_coroutine, ("w2", X))
    found = names(profile)
    assert found.count("aten::add") == 3  # two for w1, and one for w2, which is of this process too
    assert {"aten::mul", "aten::sub", "rpc_async#double(w1 -> w2)"} <= set(found)
    assert all(event.input_shapes[0] == [2] for event in profile.function_events if "::add" in event.name)


def test_a_caller_that_profiles_has_its_report_as_well(profile: Any) -> None:
    with observe.ServerProfile() as served, profile() as mine:
        rpc.rpc_sync("w1", double, (X,))
    assert names(served) == ["aten::add"]
    assert [event.name for event in observe.remote_events(mine)] == ["rpc_sync#double(w0 -> w1)#remote_op: aten::add"]


def test_remote_control_like_torchs(three: Cluster) -> None:
    made = rpc.remote("w1", compat_rpc._server_process_global_profile)
    made.rpc_sync().__enter__()
    rpc.rpc_sync("w1", torch.add, (X, X))
    made.rpc_sync().__exit__(None, None, None)
    assert "aten::add" in str(made.rpc_sync().key_averages())
    assert names(made.to_here()) == ["aten::add"]


def test_afterwards_requests_are_native_again(slow_requests: list[Any]) -> None:
    with observe.ServerProfile():
        for _ in range(MANY):
            rpc.rpc_sync("w1", double, (X,))
    assert len(slow_requests) == MANY
    slow_requests.clear()
    for _ in range(MANY):
        rpc.rpc_sync("w1", double, (X,))
    assert len(slow_requests) <= FEW


def call_without_a_request() -> None:
    with pytest.raises(SerializationError):
        rpc.rpc_sync("w1", double, (threading.Lock(),))


@pytest.mark.parametrize("work", [call_without_a_request, lambda: tracing.observer.record(1, None)])
def test_a_dropped_profile_records_nothing_more(work: Any) -> None:
    with observe.ServerProfile():
        observe.ServerProfile().__enter__()
        work()
        assert tracing.observer.serving
    observe.ServerProfile().__enter__()
    work()
    assert not tracing.observer.serving
    eventually(lambda: not interceptors.active)


def test_disabled_and_reentered_profiles() -> None:
    with observe.ServerProfile(enabled=False):
        rpc.rpc_sync("w1", double, (X,))
    profile = observe.ServerProfile()
    with profile, pytest.raises(RuntimeError, match="not reentrant"):
        profile.__enter__()
    assert pickle.loads(pickle.dumps(profile)).function_events == []


def test_torchs_names_are_redirected() -> None:
    from telegrad.compat.rpc import server_process_global_profiler

    assert server_process_global_profiler._server_process_global_profile is observe.ServerProfile
    with profiler_legacy.profile() as prof:
        compat_rpc.RemoteProfilerManager.set_current_profiling_key("named")
        rpc.rpc_sync("w1", double, (X,))
    assert [event.name for event in observe.remote_events(prof)] == ["named#remote_op: aten::add"]
