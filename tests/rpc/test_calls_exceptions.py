"""Exceptions of handlers keep their type and origin at the caller."""

import asyncio
import dataclasses
import io
import pickle
import sys
import threading
import traceback
from types import ModuleType
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.errors import RemoteError, SerializationError
from telegrad.options import Options
from telegrad.testing import cluster
from telegrad.worker.serving import handlers

pytestmark = [pytest.mark.usefixtures("two", "quiet"), pytest.mark.filterwarnings("error")]

WAYS: dict[str, Any] = {
    "sync": lambda f, *a: rpc.rpc_sync("w1", f, a),
    "async": lambda f, *a: rpc.rpc_async("w1", f, a).wait(),
    "remote": lambda f, *a: rpc.remote("w1", f, a).to_here(),
    "to self": lambda f, *a: rpc.rpc_sync("w0", f, a),
    "await": lambda f, *a: asyncio.run(awaited(f, *a)),
}
ways = pytest.mark.parametrize("way", WAYS)


async def awaited(function: Any, *args: Any) -> Any:
    return await rpc.rpc_async("w1", function, args)


def throw(error: BaseException) -> None:
    raise error


class Own(Exception):
    pass


class Particular(Exception):
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason

    def __reduce__(self) -> Any:
        return _particular, (self.code, self.reason)


def _particular(code: int, reason: str) -> Particular:
    return Particular(code, reason=reason)


class Careless(Exception):
    """Exception that pickle cannot restore: its args differ from its constructor's."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__(threading.Lock())


@dataclasses.dataclass
class Data(Exception):
    x: int


@ways
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("r"),
        Exception("e"),
        ValueError("v"),
        TypeError("t"),
        KeyError("k"),
        IndexError(1, 2),
        ZeroDivisionError("z"),
        StopIteration(3),
        AssertionError(),
        NotImplementedError("n"),
        FileNotFoundError(2, "no such", "a/b"),
        UnicodeDecodeError("utf8", b"x", 0, 1, "why"),
        MemoryError("m"),
        RecursionError("r"),
        TimeoutError("a"),
        torch.OutOfMemoryError("oom"),
        Own("o", [1]),
        Data(3),
    ],
    ids=lambda e: type(e).__name__,
)
def test_the_caller_catches_the_original_type(
    way: str, error: Exception, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "telegrad.remote")
    if isinstance(error, StopIteration) and way == "await":
        pytest.skip("a coroutine cannot raise it: see test_futures")
    with pytest.raises(type(error)) as caught:
        WAYS[way](throw, error)
    got = caught.value
    assert isinstance(got, RuntimeError)
    assert isinstance(got, RemoteError)
    assert got.args == error.args
    worker = "w0" if way == "to self" else "w1"
    assert got.worker == worker
    assert f"on worker {worker} " in str(got.__cause__)
    assert "in throw" in got.remote_traceback
    assert "in throw" in str(got.__cause__)
    (record,) = [r for r in caplog.records if r.name == "telegrad.remote"]  # the callee's own log has it too
    assert record.levelname == "INFO"
    assert record.getMessage().startswith("a call from w0 raised ")
    assert "in throw" in record.getMessage()
    assert "Traceback" not in capfd.readouterr().err


@ways
def test_attributes_are_sent(way: str) -> None:
    with pytest.raises(Particular, match="4: why") as caught:
        WAYS[way](throw, Particular(4, reason="why"))
    assert caught.value.code == 4
    assert caught.value.reason == "why"


@ways
def test_exceptions_that_pickle_cannot_restore(way: str) -> None:
    with pytest.raises(RemoteError, match=r"\.Unpicklable: <unlocked _thread.lock object") as caught:
        WAYS[way](raise_result_of, Unpicklable)
    assert any("could not be pickled" in note for note in caught.value.__notes__)
    assert "in raise_result_of" in caught.value.remote_traceback
    assert caught.value.original_type.endswith("Unpicklable")


@ways
def test_exceptions_with_another_constructor(way: str) -> None:
    with pytest.raises(Careless) as caught:
        WAYS[way](raise_result_of, lambda: Careless(1, 2))
    assert caught.value.args == ("1 and 2",)
    assert isinstance(caught.value, RemoteError)


def raise_result_of(make: Any) -> None:
    raise make()


@ways
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, BaseException])
def test_exits_raise_at_the_caller_and_end_nothing_at_the_callee(way: str, kind: type[BaseException]) -> None:
    for _ in range(3):
        with pytest.raises(RemoteError, match=rf"^the call raised {kind.__name__}\(\) on worker w[01], which ends"):
            WAYS[way](raise_result_of, kind)
    assert rpc.rpc_sync("w1", len, ((1,),)) == 1


@ways
def test_long_texts_are_complete(way: str) -> None:
    text = "Grüße, 世界 🐍 \\n \\x41 'quoted'\nsecond line"
    with pytest.raises(Own) as caught:
        WAYS[way](throw, Own(text))
    assert caught.value.args == (text,)
    assert str(caught.value) == text


def test_the_traceback_covers_all_workers_of_a_nested_call() -> None:
    with pytest.raises(Own, match="deep") as caught:
        rpc.rpc_sync("w1", rpc.rpc_sync, ("w0", rpc.rpc_sync, ("w1", throw, (Own("deep"),))))
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("in throw") >= 1
    assert "on worker w1" in text
    assert "on worker w0" in text


def cause() -> None:
    try:
        raise KeyError("first")
    except KeyError as e:
        raise ValueError("second") from e


def test_causes_are_sent() -> None:
    with pytest.raises(ValueError, match="second") as caught:
        rpc.rpc_sync("w1", cause)
    assert "KeyError: 'first'" in caught.value.remote_traceback
    assert "direct cause" in caught.value.remote_traceback


def group() -> None:
    raise ExceptionGroup("several", [ValueError(1), KeyError(2)])


def test_exception_groups() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        rpc.rpc_sync("w1", group)
    assert [type(e) for e in caught.value.exceptions] == [ValueError, KeyError]
    with pytest.raises(RuntimeError, match="several"):
        rpc.rpc_sync("w1", group)


def test_a_remote_exception_can_be_pickled_and_sent_on() -> None:
    with pytest.raises(Own) as caught:
        rpc.rpc_sync("w1", throw, (Own("there"),))
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, Own)
    assert "in throw" in again.remote_traceback
    assert isinstance(rpc.rpc_sync("w1", echo, (caught.value,)), Own)


def echo(x: Any) -> Any:
    return x


def test_exceptions_can_be_arguments_and_results() -> None:
    got = rpc.rpc_sync("w1", echo, (ValueError("just a value"),))
    assert type(got) is ValueError


def test_an_exception_with_a_tensor() -> None:
    with pytest.raises(Own) as caught:
        rpc.rpc_sync("w1", throw, (Own(torch.ones(3)),))
    assert torch.equal(caught.value.args[0], torch.ones(3))


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        rpc.rpc_sync("w1", echo)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        rpc.rpc_sync("w1", echo, (1,), {"y": 1})
    with pytest.raises(RuntimeError, match=r"aten::add"):  # the text of torch's own RPC
        rpc.rpc_sync("w1", torch.add, ())


def test_errors_of_arguments_raise_at_the_caller() -> None:
    with pytest.raises(SerializationError, match="lock") as caught:
        rpc.rpc_sync("w1", echo, ({"a": [1, pytest, unpicklable()]},))
    assert not isinstance(caught.value, RemoteError)


def unpicklable() -> Any:
    return threading.Lock()


class Hostile(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


@ways
def test_exceptions_with_a_failing_repr(way: str) -> None:
    with pytest.raises(RemoteError):
        WAYS[way](raise_result_of, Hostile)
    assert rpc.rpc_sync("w1", len, ((1,),)) == 1


def drop_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.rpc", ModuleType("telegrad.compat.rpc"))


def test_drop_in_prints_what_a_handler_raises(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    drop_in(monkeypatch)
    with pytest.raises(Own, match=r"(?s)^On WorkerInfo\(id=1, name=w1\):.*in throw"):
        rpc.rpc_sync("w1", throw, (Own("printed"),))
    assert "in throw" in capfd.readouterr().err


def test_closed_stderr_delays_no_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    drop_in(monkeypatch)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    with pytest.raises(Own):
        rpc.rpc_sync("w1", throw, (Own("silently"),), timeout=10)
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(Own):
        rpc.rpc_sync("w1", throw, (Own("silently"),), timeout=10)


@ways
def test_classes_of_closures_keep_their_type(way: str) -> None:
    class Local(ValueError):
        pass

    def fail() -> None:
        raise Local("from a closure")

    with pytest.raises(Local, match=r"^from a closure$"):
        WAYS[way](fail)


def test_callers_traceback_has_no_frames_below_the_call() -> None:
    rref = rpc.remote("w1", throw, (Own("there"),))
    uses = {
        "rpc_sync": lambda: rpc.rpc_sync("w1", throw, (Own("there"),)),
        "to_here": lambda: rref.to_here(),
        "_sync": lambda: rref.rpc_sync().anything(),
    }
    for name, use in uses.items():
        with pytest.raises(Own) as caught:
            use()
        frames = [frame.name for frame in traceback.extract_tb(caught.tb)]
        assert frames[-2:] == ["<lambda>", name]


def test_a_callee_without_memory_replies_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> Any:
        raise MemoryError("on purpose")

    monkeypatch.setattr(handlers, "SlowRequest", no_memory)
    with pytest.raises(MemoryError, match="on purpose"):
        rpc.rpc_sync("w1", len, ({1, 2},), timeout=5)  # a set: the core does not run it on its own
    monkeypatch.undo()
    assert rpc.rpc_sync("w1", len, ({1, 2},)) == 2


def test_the_log_level_is_an_option(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="remote_error_level has to be one of DEBUG, INFO"):
        Options(remote_error_level="LOUD")
    caplog.set_level("DEBUG", "telegrad.remote")
    for level, lines in (("ERROR", ["ERROR"]), ("OFF", [])):
        caplog.clear()
        with cluster(2, options=Options(remote_error_level=level)) as w, w[0], pytest.raises(Own):
            rpc.rpc_sync("w1", throw, (Own("there"),))
        assert [r.levelname for r in caplog.records if r.name == "telegrad.remote"] == lines
