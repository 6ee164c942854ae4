"""Every error says what happened, where, and what to do, and can be pickled."""

import copy
import pickle
import sys
from types import ModuleType

import pytest

from telegrad import errors

EXAMPLES = [
    errors.TelegradError("something"),
    errors.NotInitialized(),
    errors.UnknownWorker(("w0", 0), "nope", ("w0", "w1")),
    errors.RpcTimeout(0.1, "torch.add on w1", "running"),
    errors.Cancelled("torch.add on w1"),
    errors.WorkerLost("w1", "killed"),
    errors.OwnerLost("w1", "killed", "RRef 1"),
    errors.SerializationError("cannot pickle"),
    errors.DeviceNotMapped("on cuda:0"),
    errors.MessageTooLarge("of 5 GiB"),
    errors.PickleRefused("of type object"),
    errors.NotExposed("w1", "os.system", "Expose it."),
    errors.Overloaded("max_in_flight", "too many requests"),
    errors.ReceiverOutOfMemory("for 5 GiB"),
    errors.StreamError("the stream was closed"),
    errors.ShutdownTimeout(3, ("w1", "w2")),
    errors.RRefError("no"),
    errors.RRefTimeout("RRef 1"),
    errors.RRefDeleted("gone"),
    errors.RRefNotPicklable(),
    errors.RemoteError("there"),
]


def test_the_examples_are_all_there_are() -> None:
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.TelegradError) and not name.startswith("_")
    }
    assert {type(e).__name__ for e in EXAMPLES} == set(errors.__all__) == kinds


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_is_a_runtime_error_and_can_be_copied(error: errors.TelegradError) -> None:
    assert isinstance(error, RuntimeError)
    for twin in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


def test_timeout_has_the_text_that_programs_search_for() -> None:
    text = "RPC ran for more than set timeout (100 ms) and will now be marked with an error (torch.add on w1; queued)"
    error = errors.RpcTimeout(0.1, "torch.add on w1", "queued")
    assert str(error).startswith(text)
    assert "(60000 ms)" in str(errors.RpcTimeout(60))
    assert "(0.5 ms)" in str(errors.RpcTimeout(0.0005))
    assert isinstance(error, TimeoutError)


def test_the_remedy_of_a_timeout_depends_on_the_state() -> None:
    remedies = {state: str(errors.RpcTimeout(1, "", state)) for state in ("waiting", "queued", "running", "unknown")}
    assert "Start the callee earlier" in remedies["waiting"]
    assert "Raise num_worker_threads" in remedies["queued"]
    assert remedies["running"].endswith(errors.RpcTimeout.LARGER)
    assert "is stopped" in remedies["unknown"]
    assert str(errors.RpcTimeout(1, "", "queued", "Wait.")).endswith(" Wait.")


def test_unknown_worker_names_the_caller_and_the_group() -> None:
    assert str(errors.UnknownWorker(("w0", 0), "nope", ("w0", "w1"))).startswith(
        "name:w0,rank:0 could not find destination name nope. The group's workers are: w0, w1."
    )
    assert "could not find destination id 7" in str(errors.UnknownWorker(("w0", 0), 7))


def test_lost_owner_is_a_lost_worker() -> None:
    assert isinstance(errors.OwnerLost("w1", "killed"), errors.WorkerLost)
    assert "was lost with its owner, worker w1" in str(errors.OwnerLost("w1", "killed"))


def test_texts_of_not_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(errors.NotInitialized()).endswith("Call telegrad.rpc.init_rpc first.")
    closed = str(errors.NotInitialized.closed("f on w1 was pending"))
    assert (
        closed
        == "This RPC worker has shut down. Call telegrad.rpc.init_rpc to join a group again. (f on w1 was pending)"
    )
    monkeypatch.setitem(sys.modules, "torch.distributed.rpc", ModuleType("telegrad.compat.rpc"))
    assert str(errors.NotInitialized()) == str(errors.NotInitialized.closed()) == errors.NotInitialized.CALL
