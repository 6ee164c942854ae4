"""Invalid messages of passes and contexts, on the fast and the slow path."""

from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.autograd.passes.backward_pass import BackwardPass
from telegrad.autograd.passes.messages import GRADIENTS
from telegrad.errors import WorkerLost
from telegrad.testing import Cluster, eventually
from telegrad.wire import Status, Tag

TIMEOUT = 20.0


def double(x: Tensor) -> Tensor:
    return x * 2


def gradient_there_and_back() -> None:
    x = torch.rand(3, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("w1", double, (x,)).sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 2.0))


def test_both_paths_compute_a_gradient(four: Cluster) -> None:
    gradient_there_and_back()
    contexts = four[1]._worker.autograd.contexts  # type: ignore[attr-defined]
    eventually(lambda: not contexts.table and not contexts.tombstones)


@pytest.mark.parametrize("body", [b"\xff", (1, 2), ("no", 0, 1, 1, [])], ids=["garbage", "too little", "no context"])
def test_invalid_gradients_get_an_error_reply(four: Cluster, body: Any) -> None:
    me = four[0]._worker
    coded = body if type(body) is bytes else me.messages.encode(1, body).body
    completion: Any = me.engine.call(1, int(Tag.GRADIENTS), 0, 0, None, coded, None, int(TIMEOUT * 1e9), True, None)
    assert completion[0] == Status.REPLIED
    assert completion[1] == Tag.ERROR
    gradient_there_and_back()


def test_a_late_message_of_a_pass_that_is_over_is_ignored(four: Cluster) -> None:
    me = four[0]._worker
    x = torch.rand(3, requires_grad=True)
    with autograd.context() as context_id:
        for _ in range(2):
            autograd.backward(context_id, [rpc.rpc_sync("w1", double, (x,)).sum()])
        there = four[1]._worker.autograd.contexts.table[context_id]  # type: ignore[attr-defined]
        lowest = there.min_live_pass[0]
        body = me.messages.encode(1, (context_id, 0, lowest - 1, 0, [])).body
        completion: Any = me.engine.call(1, int(Tag.GRADIENTS), 0, 0, None, body, None, int(TIMEOUT * 1e9), True, None)
        assert tuple(completion[:2]) == (Status.REPLIED, Tag.GRADIENTS)
        assert (0, lowest - 1) not in there.passes


@pytest.mark.parametrize("body", [b"\xff", 5], ids=["garbage", "too little"])
def test_passes_work_after_an_invalid_end(
    four: Cluster, body: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    me = four[0]._worker
    coded = body if type(body) is bytes else me.messages.encode(1, body).body
    me.engine.send(1, int(Tag.CONTEXT_ENDED), 0, coded, None)
    eventually(pass_succeeds)


def pass_succeeds() -> bool:
    """Return whether a pass reaches the peer; an unreadable message ends a session."""
    try:
        gradient_there_and_back()
    except WorkerLost:
        return False
    return True


def test_a_message_with_too_few_gradients_names_them(four: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    on_message = BackwardPass.on_message

    def without_gradients(self: BackwardPass, peer: int, message: Any) -> Any:
        if message[0] == GRADIENTS:
            message[4].clear()
        return on_message(self, peer, message)

    with monkeypatch.context() as patch:
        patch.setattr(BackwardPass, "on_message", without_gradients)
        with pytest.raises(IndexError, match=r"0 gradients are too few for the messages \["):
            gradient_there_and_back()
    gradient_there_and_back()


@pytest.mark.parametrize("answer", [(1, 2), 7, [5], [()]], ids=["a tuple", "a number", "no message", "an empty one"])
def test_an_invalid_reply_fails_the_pass(four: Cluster, answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: Any = four[1]._worker.autograd.passes  # type: ignore[attr-defined]
    reply = passes._reply
    with monkeypatch.context() as patch:
        patch.setattr(
            passes, "_reply", lambda peer, connection, call, _, said: reply(peer, connection, call, answer, said)
        )
        patch.setattr(four[0]._worker.calls, "default_timeout", int(TIMEOUT * 1e9))
        with pytest.raises((TypeError, IndexError)):
            gradient_there_and_back()
    gradient_there_and_back()
