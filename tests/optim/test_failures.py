"""Errors of several workers as one exception."""

import pickle
import traceback

import pytest

from telegrad.errors import RemoteError, RpcTimeout, TelegradError, WorkerLost
from telegrad.optim.failures import all_of
from telegrad.serialize.exceptions import pack_exception, unpack_exception
from telegrad.types import WorkerInfo


class OfTheProgram(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


def remote(error: Exception, worker: str) -> Exception:
    try:
        raise error
    except Exception as e:
        arrived = unpack_exception(pack_exception(e, WorkerInfo(worker, 1)))
    assert isinstance(arrived, Exception)
    return arrived


def test_one_error_is_unchanged() -> None:
    error = KeyError("k")
    assert all_of("it failed", [("w1", error)]) is error


def test_several_errors_have_all_their_types() -> None:
    errors = [("w1", remote(ValueError("no rate"), "w1")), ("w2", remote(KeyError("moment"), "w2"))]
    error = all_of("the optimizer could not step", errors)
    for kind in (ValueError, KeyError, RemoteError, RuntimeError, ExceptionGroup):
        assert isinstance(error, kind)
    assert isinstance(error, ExceptionGroup)
    assert error.exceptions == tuple(e for _, e in errors)
    assert "the optimizer could not step on 2 workers: w1: ValueError: no rate; w2: KeyError: 'moment'" in str(error)
    assert "".join(traceback.format_exception(error)).count("in remote") == 2  # both tracebacks, once


def test_errors_of_one_type() -> None:
    error = all_of("it failed", [(f"w{i}", ValueError(str(i))) for i in range(3)])
    assert isinstance(error, ValueError)
    assert "on 3 workers: w0: ValueError: 0; w1: ValueError: 1; w2: ValueError: 2" in str(error)
    caught = []
    try:
        raise error
    except* ValueError as group:
        caught += group.exceptions
    assert [str(e) for e in caught] == ["0", "1", "2"]


def test_a_lost_worker_among_others() -> None:
    error = all_of("it failed", [("w1", WorkerLost("w1", "it died")), ("w2", remote(ValueError("x"), "w2"))])
    assert isinstance(error, WorkerLost)
    assert isinstance(error, ValueError)
    assert error.name == "w1"


def test_attributes_of_the_originals_are_kept() -> None:
    error = all_of("it failed", [("w1", OfTheProgram(1, "one")), ("w2", ValueError("x"))])
    assert isinstance(error, OfTheProgram)
    assert error.code == 1


def test_types_that_cannot_be_combined_keep_the_last_one() -> None:
    last = OSError(5, "disk")
    error = all_of("it failed", [("w1", UnicodeDecodeError("ascii", b"\xff", 0, 1, "bad")), ("w2", last)])
    assert error is last
    assert "it failed on 2 workers: w1: UnicodeDecodeError" in error.__notes__[0]


@pytest.mark.parametrize("is_last", [False, True])
def test_a_timeout_among_others(is_last: bool) -> None:
    errors = [("w1", RpcTimeout(5.0, "step on w1")), ("w2", remote(ValueError("no rate"), "w2"))]
    error = all_of("it failed", errors if is_last else errors[::-1])
    for kind in (ValueError, RemoteError, TelegradError, ExceptionGroup):
        assert isinstance(error, kind)
    caught: list[Exception] = []
    try:
        raise error
    except* TimeoutError as group:
        caught += group.exceptions
    except* ValueError:
        pass
    assert [type(e) for e in caught] == [RpcTimeout]


def test_timeouts_only_keep_the_last_one() -> None:
    last = RpcTimeout(5.0, "step on w2")
    assert all_of("it failed", [("w1", RpcTimeout(5.0, "step on w1")), ("w2", last)]) is last
    assert "it failed on 2 workers: w1: RpcTimeout" in last.__notes__[0]


def test_it_can_be_sent_again() -> None:
    error = all_of("it failed", [("w1", ValueError("a")), ("w2", KeyError("b"))])
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, ValueError)
    assert isinstance(again, KeyError)
    assert str(again) == str(error)
    arrived = remote(error, "w3")
    assert isinstance(arrived, ValueError)
    assert isinstance(arrived, RemoteError)
    with pytest.raises(KeyError):
        raise arrived
