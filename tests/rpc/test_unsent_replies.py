"""Replies that are not sent, because the session has ended, leave nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from retry_helpers import FAST, TCP, break_connections
from torch import Tensor

from telegrad import rpc
from telegrad.errors import WorkerLost
from telegrad.testing import Gate, cluster, eventually

WEIGHT = torch.ones(3, requires_grad=True)


def scale(gate: Gate, x: Tensor) -> Any:
    return gate.enter(WEIGHT * x)


def test_no_graph_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(2, replace(TCP, plain_backward=True)) as group:
        callee = group[1]._worker
        plain, recorded = callee.autograd.plain, []
        on_sent = plain.on_sent

        def record(sent: Any) -> None:
            on_sent(sent)
            recorded.append(sent.id)

        monkeypatch.setattr(plain, "on_sent", record)
        gate = Gate()
        future = rpc.rpc_async("w1", scale, (gate, torch.ones(3, requires_grad=True)))
        gate.wait_for()
        assert break_connections()
        with pytest.raises(WorkerLost):
            future.wait()
        assert rpc.rpc_sync("w1", abs, (-1,), retry=FAST) == 1
        eventually(lambda: not callee.members.lost)
        gate.open()
        eventually(lambda: len(recorded) == 1)
        eventually(lambda: group[1].debug_info().kept_graphs == 0)
