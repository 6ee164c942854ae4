"""The faulty agent's table: torch's names, Telegrad's messages."""

import threading
import weakref

import pytest
import torch

from telegrad import rpc
from telegrad.compat.rpc._testing import FaultyTensorPipeRpcBackendOptions
from telegrad.compat.rpc._testing.faults import KINDS, Faults
from telegrad.protocols.rref import Accept, Add, Release
from telegrad.rpc import RRef, backend_registry
from telegrad.testing import cluster


def test_calls_are_lost_each_time() -> None:
    faults = Faults(["PYTHON_REMOTE_CALL"], {}, 3)
    assert all(faults.loses("remote", False, attempt) for attempt in range(5))
    assert not faults.loses("remote", True)
    assert not faults.loses("call", False)


def test_messages_sent_again_are_lost_the_given_number_of_times() -> None:
    faults = Faults(["RREF_USER_DELETE"], {"SCRIPT_CALL": 1.5, "RREF_USER_DELETE": 0.5}, 3)
    assert [faults.loses(Release.__name__, False, attempt) for attempt in range(4)] == [True, True, True, False]
    assert faults.delay_of(Release.__name__, False) == 0.5
    assert faults.delay_of("call", True) == 1.5
    assert faults.delay_of("call", False) == 0


def test_lost_calls_fail_at_their_caller() -> None:
    with cluster(2) as w, w[0]:
        for name, start in (
            ("PYTHON_CALL", lambda: rpc.rpc_sync("w1", Value)),
            ("SCRIPT_CALL", lambda: rpc.rpc_sync("w1", torch.add, (torch.ones(1), 1))),
            ("PYTHON_REMOTE_CALL", lambda: rpc.remote("w1", Value).to_here()),
            ("SCRIPT_REMOTE_CALL", lambda: rpc.remote("w1", torch.add, (torch.ones(1), 1)).to_here()),
            ("PYTHON_RREF_FETCH_CALL", lambda: rpc.remote("w1", Value).to_here()),
            ("SCRIPT_RREF_FETCH_CALL", lambda: rpc.remote("w1", torch.add, (torch.ones(1), 1)).to_here()),
        ):
            interceptors = w[0]._worker.calls.own_interceptors
            interceptors.add(Faults([name], {}, 1))
            with pytest.raises(Exception, match="to worker w1 was lost on purpose"):
                start()
            interceptors.clear()


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

    class Losing(Faults):
        def loses(self, kind: str, scripted: bool, attempt: int = 0) -> bool:
            is_lost = super().loses(kind, scripted, attempt)
            if is_lost:
                lost.append((kind, attempt))
            return is_lost

    with cluster(3) as w:
        for worker in w:
            faults = Losing(["RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE"], {}, 2)
            worker._worker.calls.own_interceptors.add(faults)
        rref = w[0].remote("w1", Value)
        assert w[0].rpc_sync("w2", ask, (rref,)) == 42
        del rref
        assert _freed.wait(20)
    assert {(kind.__name__, attempt) for kind in (Add, Accept, Release) for attempt in range(2)} <= set(lost)
    assert max(attempt for _, attempt in lost) == 1


def test_no_failures_means_none() -> None:
    assert not Faults(list(KINDS), {}, 0).loses("remote", False)


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
