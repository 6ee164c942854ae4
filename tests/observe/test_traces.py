"""Chrome traces contain the work of other workers."""

import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from profile_helpers import double, relay
from torch.autograd import profiler_legacy

from telegrad import observe, rpc

X = torch.ones(2)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_of_kineto_has_a_process_for_each_worker(tmp_path: Path, name: str) -> None:
    with torch.profiler.profile() as prof:
        rpc.rpc_sync("w1", relay, ("w2", X))
    path = tmp_path / name
    prof.export_chrome_trace(str(path))
    with (gzip.open if name.endswith("gz") else open)(path) as file:
        found = json.load(file)["traceEvents"]
    assert os.listdir(tmp_path) == [name]
    processes = {e["pid"]: e["args"]["name"] for e in found if e["ph"] == "M" and e["name"] == "process_name"}
    assert processes["rpc worker 1"] == "worker w1"
    assert processes["rpc worker 2"] == "worker w2"
    (add,) = [e for e in found if e["pid"] == "rpc worker 2" and e["name"] == "aten::add"]
    assert add["args"]["Call"].endswith("rpc_sync#double(w1 -> w2)")
    call = "rpc_sync#relay(w0 -> w1)"
    here, there = sorted((e for e in found if e["name"] == call), key=lambda e: isinstance(e["pid"], str))
    assert there["pid"] == "rpc worker 1"
    start, finish = (next(e for e in found if e["ph"] == phase and e.get("cat") == "rpc") for phase in "sf")
    assert start["id"] == finish["id"]
    assert (start["pid"], start["tid"]) == (here["pid"], here["tid"]) == (os.getpid(), threading.get_native_id())
    assert (finish["pid"], finish["tid"]) == (there["pid"], there["tid"])
    margin = 1.0  # us; Kineto rounds
    assert here["ts"] - margin <= there["ts"] <= add["ts"]
    assert add["ts"] + add["dur"] <= there["ts"] + there["dur"] <= here["ts"] + here["dur"] + margin
    assert start["ts"] <= finish["ts"]


def test_a_trace_without_calls_is_torchs_own(tmp_path: Path) -> None:
    with torch.profiler.profile() as prof:
        torch.add(X, X)
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    assert "rpc" not in path.read_text()


def test_the_methods_of_torch_take_keywords(tmp_path: Path) -> None:
    prof = torch.autograd.profiler.profile()
    prof.__enter__()
    rpc.rpc_sync("w1", double, (X,))
    prof.__exit__(exc_type=None, exc_val=None, exc_tb=None)
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(path=str(path))
    assert "rpc_sync#double(w0 -> w1)" in path.read_text()


def test_a_trace_of_the_legacy_profiler_has_remote_operators(tmp_path: Path) -> None:
    with profiler_legacy.profile() as prof:
        rpc.rpc_sync("w1", double, (X,))
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    names = [event["name"] for event in json.loads(path.read_text())]
    assert "rpc_sync#double(w0 -> w1)#remote_op: aten::add" in names


def test_remote_calls_can_be_asked_for(profile: Any) -> None:
    with profile() as prof:
        rpc.rpc_sync("w1", double, (X,))
    (call,) = observe.remote_calls(prof)
    assert (call.key, call.node, call.name) == ("rpc_sync#double(w0 -> w1)", 1, "w1")
    assert call.sent <= call.received <= call.replied
    assert [event.name for event in call.events] == ["rpc_sync#double(w0 -> w1)#remote_op: aten::add"]
    assert observe.remote_calls(profiler_legacy.profile(enabled=False)) == []
