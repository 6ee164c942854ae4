"""The faulty agent's table: torch's names, Telegrad's messages."""

import threading
import weakref

import pytest

from telegrad.compat.rpc._testing import FaultyTensorPipeRpcBackendOptions
from telegrad.compat.rpc._testing.faults import KINDS, Faults
from telegrad.protocols.rref import Accept, Add, Release
from telegrad.rpc import RRef, backend_registry
from telegrad.testing import cluster
from telegrad.worker.calls.faults import DroppedMessage


def test_calls_are_lost_each_time() -> None:
    faults = Faults(["PYTHON_REMOTE_CALL"], {}, 3)
    for _ in range(5):
        with pytest.raises(DroppedMessage, match=r"to worker 2 was lost on purpose"):
            faults("remote", False, 2)
    assert faults("remote", True, 2) is None
    assert faults("call", False, 2) is None


def test_messages_sent_again_are_lost_the_given_number_of_times() -> None:
    faults = Faults(["RREF_USER_DELETE"], {"SCRIPT_CALL": 1.5, "RREF_USER_DELETE": 0.5}, 3)
    for attempt in range(3):
        with pytest.raises(DroppedMessage):
            faults(Release.__name__, False, 2, attempt)
    assert faults(Release.__name__, False, 2, 3) == 0.5
    assert faults("call", True, 2) == 1.5
    assert faults("call", False, 2) is None


_freed = threading.Event()


class Value:
    """An object that signals its deletion."""

    def __init__(self) -> None:
        weakref.finalize(self, _freed.set)

    def answer(self) -> int:
        return 42


def ask(rref: RRef[Value]) -> int:
    answer: int = rref.rpc_sync().answer()
    return answer


def test_references_tolerate_the_loss_of_each_message() -> None:
    lost: list[tuple[str, int]] = []
    faults = Faults(["RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE"], {}, 2)

    def losing(kind: str, scripted: bool, peer: int, attempt: int) -> float | None:
        try:
            return faults(kind, scripted, peer, attempt)
        except DroppedMessage:
            lost.append((kind, attempt))
            raise

    with cluster(3) as w:
        for worker in w:
            worker._worker.calls.send_filter = losing
        rref = w[0].remote("w1", Value)
        assert w[0].rpc_sync("w2", ask, (rref,)) == 42
        del rref
        assert _freed.wait(20)
    assert {(kind.__name__, attempt) for kind in (Add, Accept, Release) for attempt in range(2)} <= set(lost)
    assert max(attempt for _, attempt in lost) == 1


def test_no_failures_means_none() -> None:
    assert Faults(list(KINDS), {}, 0)("remote", False, 2) is None


def test_reference_messages_are_named_as_their_classes() -> None:
    assert {Add.__name__, Accept.__name__, Release.__name__} <= {kind.name for kind in KINDS.values()}


def test_options_keep_what_they_are_given() -> None:
    options = backend_registry.construct_rpc_backend_options(
        backend_registry.BackendType.FAULTY_TENSORPIPE,
        init_method="file:///x",
        num_worker_threads=8,
        num_fail_sends=3,
        messages_to_fail=["RREF_FORK_REQUEST"],
        messages_to_delay={"PYTHON_CALL": 1.5},
    )
    assert isinstance(options, FaultyTensorPipeRpcBackendOptions)
    assert (options.num_worker_threads, options.num_fail_sends, options.rpc_timeout) == (8, 3, 60)
    assert options.messages_to_fail == ["RREF_FORK_REQUEST"]
    assert options.messages_to_delay == {"PYTHON_CALL": 1.5}
    with pytest.raises(ValueError, match="no such messages: LETTER"):
        FaultyTensorPipeRpcBackendOptions(messages_to_fail=["LETTER"])
