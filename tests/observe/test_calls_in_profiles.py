"""Profiles of calls and their remote work, under torch's own names."""

import asyncio
import threading
from typing import Any

import profile_helpers
import pytest
import torch
from profile_helpers import FEW, MANY, Box, double, events, named, only
from torch.autograd import profiler_legacy

from telegrad import observe, rpc
from telegrad.errors import NotInitialized, RpcTimeout
from telegrad.observe.hooks import session_of
from telegrad.testing import Cluster, Gate, eventually, run_all
from telegrad.worker.calls import interceptors, tracing

X = torch.ones(2)


def test_calls_of_every_kind_and_their_operators_are_shown(profile: Any) -> None:
    with profile() as prof:
        rpc.rpc_sync("w1", double, (X,))
        rpc.rpc_async("w1", torch.add, (X, X)).wait()
        rref = rpc.remote("w1", torch.mul, (X, X))
        rref.to_here()
        rref._get_profiling_future().wait()
    for call, operator in (
        ("rpc_sync#double(w0 -> w1)", "aten::add"),
        ("rpc_async#aten::add(w0 -> w1)", "aten::add"),
        ("rpc_remote#aten::mul(w0 -> w1)", "aten::mul"),
    ):
        local, remote = only(prof, call), only(prof, f"{call}#remote_op: {operator}")
        assert (local.node_id, local.is_remote) == (0, False)
        assert (remote.node_id, remote.is_remote) == (1, True)
        assert local.time_range.start <= remote.time_range.start < remote.time_range.end <= local.time_range.end
    assert only(prof, "to_here#(w0)->(w1)").node_id == 0
    assert {event.name for event in observe.remote_events(prof)} == {e.name for e in events(prof) if e.is_remote}
    assert "rpc_sync#double" in prof.key_averages().table(max_name_column_width=100)


def test_methods_of_referenced_values_are_shown_by_their_names(profile: Any) -> None:
    rref = rpc.remote("w1", Box)
    rref.to_here()
    with profile() as prof:
        rref.rpc_sync().get()
        rref.rpc_async().get().wait()
        rref.remote().get()._get_profiling_future().wait()
    for mode in ("sync", "async", "remote"):
        assert only(prof, f"rpc_{mode}#get(w0 -> w1)#remote_op: aten::add").node_id == 1
    assert only(prof, "rpc_async#_rref_typeof_on_owner(w0 -> w1)").node_id == 0  # for `remote`, once


def test_functions_that_telegrad_carries_are_shown_by_their_names(profile: Any) -> None:
    rref = rpc.remote("w1", Box)
    rref.to_here()
    with profile() as retried:
        rpc.rpc_sync("w1", double, (X,), retry=rpc.Retry())
    with profile() as mapped:
        assert len(list(rpc.map(["w1"], double, [X]))) == 1
    with profile() as streamed:
        assert len(list(rpc.stream("w1", profile_helpers.doubles, (X, 2), prefetch=1))) == 2
        assert len(list(rref.stream(prefetch=1).copies(2))) == 2
    for prof in (retried, mapped):
        assert only(prof, "rpc_async#double(w0 -> w1)#remote_op: aten::add").node_id == 1
    for name, operator in (("doubles", "add"), ("copies", "mul")):
        for call in (f"rpc_async#{name}(w0 -> w1)", f"rpc_async#a step of {name}(w0 -> w1)"):
            assert named(streamed, f"{call}#remote_op: aten::{operator}")


def test_an_awaited_value_is_recorded_until_it_has_arrived(profile: Any) -> None:
    gate = Gate()
    rref = rpc.remote("w1", gate.enter, (X,))

    async def fetch() -> None:
        asyncio.get_running_loop().call_soon(gate.open)
        await rref  # another thread receives the reply
        with torch.profiler.record_function("after"):
            pass

    with profile() as prof:
        asyncio.run(fetch())
    assert only(prof, "to_here#(w0)->(w1)").time_range.end <= only(prof, "after").time_range.start


RELAYS = (profile_helpers.relay, profile_helpers.relay_later, profile_helpers.relay_in_coroutine)


@pytest.mark.parametrize("function", RELAYS)
def test_nested_calls_are_shown_under_both_names(profile: Any, function: Any) -> None:
    with profile() as prof:
        rpc.rpc_sync("w1", function, ("w2", X))
    outer = f"rpc_sync#{function.__name__}(w0 -> w1)"
    mode = "sync" if function is profile_helpers.relay else "async"
    inner = f"{outer}#remote_op: rpc_{mode}#double(w1 -> w2)"
    assert only(prof, inner).node_id == 1
    operator = only(prof, f"{inner}#remote_op: aten::add")
    assert operator.node_id == 2
    call = only(prof, outer).time_range
    assert call.start <= operator.time_range.start < operator.time_range.end <= call.end


def test_steps_of_a_coroutine_and_callbacks_of_a_future_are_recorded(profile: Any) -> None:
    with profile() as prof:
        rpc.rpc_sync("w1", profile_helpers.relay_in_coroutine, ("w2", X))
        rpc.rpc_sync("w1", profile_helpers.relay_later, ("w2", X))
    for name in ("aten::mul", "aten::sub"):
        assert only(prof, f"rpc_sync#relay_in_coroutine(w0 -> w1)#remote_op: {name}").node_id == 1
    assert only(prof, "rpc_sync#relay_later(w0 -> w1)#remote_op: aten::mul").node_id == 1


def test_a_failed_call_is_shown_with_its_operators(profile: Any) -> None:
    with profile() as prof:
        with pytest.raises(ValueError, match="on purpose"):
            rpc.rpc_sync("w1", profile_helpers.fail, (X,))
        with pytest.raises(ValueError, match="on purpose"):
            rpc.rpc_async("w1", profile_helpers.fail, (X,)).wait()
        with pytest.raises(Exception, match="lock"):
            rpc.rpc_sync("w1", double, (threading.Lock(),))
    for mode in ("sync", "async"):
        only(prof, f"rpc_{mode}#fail(w0 -> w1)#remote_op: aten::add")


class _NoHash:
    def __hash__(self) -> int:
        raise ValueError("no hash")

    def __call__(self) -> None: ...


class _Closed:
    """A client that sends nothing."""

    def __init__(self, client: Any) -> None:
        self.start = client.start

    def start_request(self, *_: Any) -> None:
        raise NotInitialized


def test_a_call_that_is_not_sent_leaves_no_span_open(
    three: Cluster, profile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with profile():
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(ValueError, match="no hash"):
                call("w1", _NoHash())
        calls = three[0]._worker.calls
        monkeypatch.setattr(calls, "client", _Closed(calls.client))
        with pytest.raises(NotInitialized):
            rpc.rpc_async("w1", double, (X,))
    assert not tracing.observer._spans


def test_a_timed_out_call_is_shown_and_its_late_report_is_dropped(profile: Any) -> None:
    gate = Gate()
    with profile() as prof:
        with pytest.raises(RuntimeError, match="ran for more than"):
            rpc.rpc_sync("w1", gate.enter, timeout=0.01)
        future = rpc.rpc_async("w1", gate.enter, timeout=0.01)
        with pytest.raises(RuntimeError, match="ran for more than"):
            future.wait()
    gate.open()
    names = [event.name for event in events(prof)]
    assert sum("rpc_sync#" in name for name in names) == 1
    assert sum("rpc_async#" in name for name in names) == 1


def test_a_request_without_a_reply_does_not_keep_calls_on_the_slow_path(profile: Any) -> None:
    with profile(), pytest.raises(RpcTimeout):
        rpc.rpc_sync("w1", profile_helpers.never, timeout=0.1)
    eventually(lambda: not interceptors.active)


def test_a_call_that_outlives_the_profiler_completes(profile: Any) -> None:
    """The record of the call ends before the profiler does."""
    gate = Gate()
    with profile() as prof:
        future = rpc.rpc_async("w1", gate.enter)
        session = session_of(prof)
        assert session is not None
        (span,) = session._open
    assert span._done is not None
    assert span._done.done()
    assert len([event for event in events(prof) if event.name.startswith("rpc_async#")]) == 1
    gate.open()
    future.wait()
    assert not observe.remote_calls(prof)


def test_calls_of_one_name_in_a_row_are_all_shown(profile: Any) -> None:
    with profile() as prof:
        torch.futures.wait_all([rpc.rpc_async("w1", double, (X,)) for _ in range(5)])
    assert len(named(prof, "rpc_async#double(w0 -> w1)")) == 5
    assert len(named(prof, "rpc_async#double(w0 -> w1)#remote_op: aten::add")) == 5
    assert not any("telegrad" in event.name for event in events(prof))


def test_a_call_is_inside_the_users_range(profile: Any) -> None:
    with profile() as prof, torch.profiler.record_function("mine"):
        rpc.rpc_sync("w1", double, (X,))
    mine, call = only(prof, "mine"), only(prof, "rpc_sync#double(w0 -> w1)")
    assert call.cpu_parent is mine
    assert mine.cpu_children == [call]


def test_options_of_the_profiler_apply_remotely(profile: Any) -> None:
    def remote_add(**options: bool) -> Any:
        with profile(**options) as prof:
            rpc.rpc_sync("w1", double, (torch.ones(3, 4),))
        return only(prof, "rpc_sync#double(w0 -> w1)#remote_op: aten::add")

    assert remote_add().input_shapes == []
    assert remote_add().cpu_memory_usage == 0
    assert remote_add(record_shapes=True).input_shapes[:2] == [[3, 4], [3, 4]]
    assert remote_add(profile_memory=True).cpu_memory_usage == 3 * 4 * 4
    assert remote_add(with_flops=True).flops > 0


def test_operators_of_a_callee_form_a_separate_tree(profile: Any) -> None:
    with profile() as prof:
        rpc.rpc_sync("w1", double, (torch.ones(2, dtype=torch.int64),))
        rpc.rpc_sync("w1", torch.relu, (X,))
    relu = only(prof, "rpc_sync#aten::relu(w0 -> w1)#remote_op: aten::relu")
    assert [child.name for child in relu.cpu_children] == ["rpc_sync#aten::relu(w0 -> w1)#remote_op: aten::clamp_min"]


def test_other_threads_are_not_shown(profile: Any, three: Cluster) -> None:
    with profile() as prof:
        run_all([lambda: three[0].rpc_sync("w1", double, (X,))])
    assert not [event for event in events(prof) if "rpc_" in event.name]


def test_profilers_of_two_threads_see_their_own_calls(three: Cluster) -> None:
    """Kineto is one for the process; the legacy profiler is a thread's."""
    both = threading.Barrier(2)

    def run(to: str, operator: Any) -> Any:
        with profiler_legacy.profile() as prof:
            both.wait(10)
            three[0].rpc_sync(to, operator, (X, X))
            both.wait(10)
        return sorted(event.name for event in events(prof) if event.is_remote)

    first, second = run_all([lambda: run("w1", torch.mul), lambda: run("w2", torch.sub)])
    assert first == ["rpc_sync#aten::mul(w0 -> w1)#remote_op: aten::mul"]
    assert second == ["rpc_sync#aten::sub(w0 -> w2)#remote_op: aten::sub"]


def test_a_callee_may_profile_itself_at_the_same_time(profile: Any) -> None:
    with profile() as prof:
        assert rpc.rpc_sync("w1", profile_helpers.profile_yourself, (X,)) == ["aten::mul"]
    for name in ("aten::add", "aten::sub"):
        only(prof, f"rpc_sync#profile_yourself(w0 -> w1)#remote_op: {name}")


def test_calls_to_this_worker_are_shown_as_any(profile: Any) -> None:
    with profile() as prof:
        rpc.rpc_sync("w0", double, (X,))
    assert only(prof, "rpc_sync#double(w0 -> w0)#remote_op: aten::add").node_id == 0


def test_the_next_call_may_be_given_a_name(profile: Any) -> None:
    with profile() as prof:
        observe.name_next_call("my own name")
        rpc.rpc_sync("w1", double, (X,))
        rpc.rpc_sync("w1", double, (X,))
    only(prof, "my own name#remote_op: aten::add")
    only(prof, "rpc_sync#double(w0 -> w1)#remote_op: aten::add")


def test_internal_calls_are_not_shown(profile: Any, three: Cluster) -> None:
    core = three[0]._worker
    with profile() as prof:
        core.start_internal(1, double, (X,), 10.0).wait()
    assert not [event for event in events(prof) if "rpc_" in event.name]


def test_a_profiler_with_a_schedule_shows_each_cycle() -> None:
    seen = []
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=2),
        on_trace_ready=lambda prof: seen.append(len(named(prof, "rpc_sync#double(w0 -> w1)#remote_op: aten::add"))),
    ) as prof:
        for _ in range(6):
            rpc.rpc_sync("w1", double, (X,))
            prof.step()
    assert seen == [1, 1]


def test_without_a_profiler_requests_are_native(slow_requests: list[Any], three: Cluster) -> None:
    def call() -> None:
        for _ in range(MANY):
            three[0].rpc_sync("w1", double, (X,))

    call()
    assert len(slow_requests) <= FEW
    with profiler_legacy.profile():
        run_all([call])  # nor do those of threads that are not profiled
        assert len(slow_requests) <= 2 * FEW
        call()
    assert len(slow_requests) >= MANY
