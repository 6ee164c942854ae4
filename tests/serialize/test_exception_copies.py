"""Copies of exceptions, and what a program adds to exceptions of other workers."""

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from telegrad import rpc
from telegrad.serialize import exceptions
from telegrad.serialize.exceptions import pack_exception, unpack_exception
from telegrad.serialize.plain_exceptions import encode_facts
from telegrad.serialize.plain_fields import encode_fields
from telegrad.serialize.tracebacks import clone_exception, set_cause
from telegrad.serialize.unpickling import OPEN, PickleGate
from telegrad.testing import Cluster
from telegrad.types import WorkerInfo

CLOSED = PickleGate(False)


class OtherArgs(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Frozen(OtherArgs):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.__dict__["is_frozen"] = True

    def __setattr__(self, name: str, value: object) -> None:
        if "is_frozen" in self.__dict__:
            raise AttributeError(f"cannot set {name}")
        super().__setattr__(name, value)


class CopiesAsItself(Exception):
    def __copy__(self) -> "CopiesAsItself":
        return self


class ReducesToAnother(Exception):
    def __reduce__(self) -> Any:
        return ValueError, self.args


@pytest.mark.parametrize(
    "error", [OtherArgs(1, "x"), Frozen(1, "x"), CopiesAsItself(1), ReducesToAnother(1)], ids=lambda e: type(e).__name__
)
def test_every_class_has_copies_so_that_the_stored_exception_gets_no_frames(error: Exception) -> None:
    set_cause(error, KeyError("cause"))
    again = clone_exception(error)
    assert again is not error
    assert type(again) is type(error)
    assert (again.args, vars(again), again.__cause__) == (error.args, vars(error), error.__cause__)
    with pytest.raises(type(error)):
        raise again
    assert error.__traceback__ is None


def sent(error: BaseException, gate: PickleGate = OPEN) -> Any:
    return unpack_exception(pack_exception(error, WorkerInfo("w1", 1), gate), gate)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "clone": clone_exception,
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),
    "forwarded": sent,
    "forwarded, pickled, copied": lambda error: copy.copy(pickle.loads(pickle.dumps(sent(error)))),
    "forwarded without pickles": lambda error: sent(error, CLOSED),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("original", [KeyError("k"), OSError(2, "no", "file"), OtherArgs(1, "x")], ids=repr)
def test_copies_have_what_the_program_has_added(how: str, original: Exception) -> None:
    if how == "forwarded without pickles" and isinstance(original, OtherArgs):
        return  # its class is sent by a pickle
    original.__notes__ = ["of the callee"]
    error = sent(original, CLOSED if how == "forwarded without pickles" else OPEN)
    error.add_note("first")
    error.step = {1}
    again = COPIES[how](error)
    assert (again.args, again.__notes__, again.step) == (error.args, ["of the callee", "first"], {1})
    again.args = ("other",)
    again.add_note("second")
    third = COPIES[how](again)
    assert type(third) is type(error)
    assert (third.args, third.__notes__, third.step) == (("other",), ["of the callee", "first", "second"], {1})
    assert error.__notes__ == ["of the callee", "first"]
    if isinstance(original, OSError):
        assert (third.errno, third.filename) == (2, "file")


def test_unchanged_exceptions_are_forwarded_as_they_came() -> None:
    error = sent(KeyError("k"))
    assert vars(error)[exceptions._ORIGIN].changes is None
    assert vars(sent(error))[exceptions._ORIGIN].changes is None


def test_added_values_that_cannot_be_sent_are_left_out() -> None:
    error = sent(KeyError("k"))
    error.lock, error.step = threading.Lock(), 1
    again = sent(error)
    assert again.step == 1
    assert not hasattr(again, "lock")


loaded: list[str] = []


class Hostile:
    def __reduce__(self) -> Any:
        return loaded.append, ("loaded",)


def test_changes_load_no_pickle_behind_a_closed_gate() -> None:
    changes, _ = encode_facts((), {"step": Hostile()}, pickle.dumps)
    origin = vars(sent(KeyError("k"), CLOSED))[exceptions._ORIGIN]
    error: Any = unpack_exception(encode_fields(origin._replace(changes=changes)), CLOSED)
    assert isinstance(error, KeyError)
    assert "PickleRefused" in error.__notes__[-1]
    copy.copy(error)
    sent(error, CLOSED)
    pickle.loads(pickle.dumps(error))
    assert not loaded


def fail() -> None:
    raise KeyError("k")


async def fail_later() -> None:
    raise KeyError("k")


def add_to(done: Any) -> Any:
    try:
        return done.value()
    except KeyError as error:
        error.add_note("added")
        error.step = 1  # type: ignore[attr-defined]
        raise


def add_to_result(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> Any:
    return proceed(call).then(add_to)


def waited(future: Any) -> Any:
    async def main() -> Any:
        return await future

    return asyncio.run(main())


@pytest.mark.parametrize("function", [fail, fail_later], ids=lambda f: f.__name__)
@pytest.mark.parametrize("end", ["client", "server"])
def test_interceptors_may_add_to_exceptions(two: Cluster, end: str, function: Any) -> None:
    kind: Any = {end: add_to_result}
    with two[0 if end == "client" else 1], rpc.intercept(**kind), two[0], pytest.raises(KeyError) as caught:
        rpc.rpc_sync("w1", function)
    assert (caught.value.__notes__[0], caught.value.step) == ("added", 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("wait", [lambda future: future.wait(), waited], ids=["wait", "await"])
def test_callbacks_may_add_to_exceptions(two: Cluster, wait: Callable[[Any], Any]) -> None:
    with pytest.raises(KeyError) as caught:
        wait(two[0].rpc_async("w1", fail).then(add_to))
    added, where = caught.value.__notes__
    assert (added, caught.value.step) == ("added", 1)  # type: ignore[attr-defined]
    assert "in add_to" in where
    assert "future.py" not in where
