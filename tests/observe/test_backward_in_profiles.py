"""Profiles show backward passes, and what they run on other workers."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from profile_helpers import double, events, named, only, relay
from torch.autograd import profiler_legacy

from telegrad import autograd, observe, rpc
from telegrad.testing import Cluster, run_all
from telegrad.worker.calls import tracing

BACKWARD = "torch::distributed::autograd::backward"
RECV = "torch::distributed::autograd::RecvRpcBackward"
SEND = "torch::distributed::autograd::SendRpcBackward"


def run_pass(profile: Any, function: Any, *arguments: Any) -> Any:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        loss = (rpc.rpc_sync("w1", function, (*arguments, x)) * x).sum()
        with profile() as prof:
            autograd.backward(context, [loss])
        assert torch.equal(autograd.get_gradients(context)[x], torch.full((2,), 4.0))
    return prof


def test_a_pass_is_shown_with_its_work_on_other_workers(profile: Any) -> None:
    prof = run_pass(profile, double)
    whole, recv, send = only(prof, BACKWARD), only(prof, RECV), only(prof, SEND)
    assert {event.node_id for event in (whole, recv, send)} == {0}
    assert not any(event.is_remote for event in (whole, recv, send))
    assert any("MulBackward0" in event.name and not event.is_remote for event in events(prof))
    (there,) = [event for event in events(prof) if event.name == f"{BACKWARD}#remote_op: AddBackward0"]
    assert (there.node_id, there.is_remote) == (1, True)
    assert named(prof, f"{BACKWARD}#remote_op: {SEND}")
    for inner in (recv, send, there):
        assert whole.time_range.start <= inner.time_range.start <= inner.time_range.end <= whole.time_range.end


def test_a_trace_has_the_work_of_other_workers(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run_pass(torch.profiler.profile, relay, "w2").export_chrome_trace(str(path))
    found = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert (names["rpc worker 1"], names["rpc worker 2"]) == ("worker w1", "worker w2")
    (add,) = [event for event in found if event["name"] == "AddBackward0"]
    assert (add["pid"], add["args"]["Call"]) == ("rpc worker 2", BACKWARD)
    (whole,) = [event for event in found if event["name"] == BACKWARD]
    assert whole["ts"] <= add["ts"] <= add["ts"] + add["dur"] <= whole["ts"] + whole["dur"]


def test_indirectly_called_workers_are_shown(profile: Any) -> None:
    prof = run_pass(profile, relay, "w2")
    found = [event for event in events(prof) if event.name.endswith("#remote_op: AddBackward0")]
    assert [(event.node_id, event.name) for event in found] == [(2, f"{BACKWARD}#remote_op: AddBackward0")]
    assert [event.node_id for event in named(prof, f"{BACKWARD}#remote_op: {SEND}")].count(2) == 1


def test_a_failed_pass_leaves_no_profiler_on() -> None:
    x = torch.ones(2, requires_grad=True)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("on purpose")

    with profiler_legacy.profile() as prof, autograd.context() as context:
        y = rpc.rpc_sync("w1", double, (x,))
        y.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            autograd.backward(context, [y.sum()])
    only(prof, BACKWARD)


def test_work_of_other_threads_for_this_one_is_in_its_profile(profile: Any, three: Cluster) -> None:
    """A pool thread that handles a reply of the pass is recorded."""
    calls = three[0]._worker.calls
    with profile() as prof:
        side = tracing.observer.side_thread_recording(calls)

        def help_out() -> None:
            with side:
                torch.mul(torch.ones(2), torch.ones(2))
                three[0].rpc_sync("w1", torch.sub, (torch.ones(2), torch.ones(2)))

        run_all([help_out])
        side.report()
    mul = only(prof, "aten::mul")
    assert (mul.node_id, mul.is_remote) == (0, False)
    assert only(prof, "rpc_sync#aten::sub(w0 -> w1)").is_remote is False
    assert only(prof, "rpc_sync#aten::sub(w0 -> w1)#remote_op: aten::sub").node_id == 1


def test_a_recording_continues_after_a_drain_inside_a_range() -> None:
    recording = tracing.observer.record(7, (0, 0))
    with recording, torch.profiler.record_function("open"):
        torch.mul(torch.ones(2), torch.ones(2))
        first = [event[0] for event in recording.drain()]
        torch.sub(torch.ones(2), torch.ones(2))
    *_, second = recording.report()
    assert "aten::mul" in first
    assert "aten::sub" in [event[0] for event in second]
    assert "aten::mul" not in [event[0] for event in second]


def test_threads_without_a_profiler_are_not_recorded(three: Cluster) -> None:
    with profiler_legacy.profile():
        found: list[Any] = []
        thread = threading.Thread(
            target=lambda: found.append(tracing.observer.side_thread_recording(three[0]._worker.calls))
        )
        thread.start()
        thread.join(10)
    assert found == [None]


def test_passes_of_others_are_in_a_servers_profile() -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync("w1", double, (x,)).sum()
        with observe.ServerProfile() as profile:
            autograd.backward(context, [loss])
    assert "AddBackward0" in [event.name for event in profile.function_events]
