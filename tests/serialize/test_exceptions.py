"""Remote exceptions as the caller gets them."""

import asyncio
import copy
import dataclasses
import pickle
import sys
import threading
import traceback
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.futures import Future, collect_all, wait_all

from telegrad.errors import RemoteError, RpcTimeout, TelegradError, WorkerLost
from telegrad.serialize.exceptions import describe_exception, pack_exception, unpack_exception
from telegrad.serialize.tracebacks import RemoteTraceback, clear_frames, clone_exception, strip_own_frames, traceback_of
from telegrad.types import WorkerInfo
from telegrad.worker.calls.callables import method_of, run

HERE = WorkerInfo("w1", 1)
FURTHER = WorkerInfo("w2", 2)


class Custom(Exception):
    def __init__(self, code: int, *, hint: str = "") -> None:
        super().__init__(code)
        self.code = code
        self.hint = hint


class CustomKeyError(KeyError):
    pass


class OtherArgs(Exception):
    def __init__(self, flag: bool, text: str) -> None:
        self.flag = flag
        super().__init__(f"{text}!")


class OtherArgsOfAnOSError(PermissionError):
    def __init__(self, path: str, user: str) -> None:
        super().__init__(f"{user} may not read {path}")
        self.path = path


class BrokenRepr(Exception):
    def __repr__(self) -> str:
        raise ValueError("no")

    __str__ = __repr__


class ExitsWhenPickled(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit(3)


class MadeElsewhere(Exception):
    """Exception that pickles as another type of object."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (5,)


def sent(error: BaseException, worker: WorkerInfo = HERE) -> BaseException:
    """Return the exception that the caller gets if a worker raises this one."""
    try:
        raise error
    except BaseException as e:
        return unpack_exception(pack_exception(e, worker))


@pytest.mark.parametrize(
    "error",
    [
        KeyError("k"),
        ValueError("v"),
        TypeError("t"),
        RuntimeError("r"),
        Exception("e"),
        OSError(2, "gone", "file"),
        UnicodeDecodeError("utf8", b"abc", 0, 1, "why"),
        StopIteration(5),
        AssertionError(),
        SyntaxError("bad", ("file", 1, 2, "text")),
        ExceptionGroup("several", [ValueError(1), KeyError(2)]),
        CustomKeyError("k"),
        RpcTimeout(0.1, "f on w2", "running"),
        WorkerLost("w2", "killed"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_is_of_the_original_type_and_a_runtime_error(error: Exception) -> None:
    for arrived in (sent(error), sent(sent(error), FURTHER), pickle.loads(pickle.dumps(sent(error)))):
        assert isinstance(arrived, type(error))
        assert isinstance(arrived, RemoteError)
        assert isinstance(arrived, RuntimeError)
        assert repr(arrived.args) == repr(error.args)
        assert arrived.original_type.rpartition(".")[2] == type(error).__qualname__


def test_attributes_arrive() -> None:
    arrived = sent(OSError(2, "gone", "file"))
    assert isinstance(arrived, FileNotFoundError)
    assert (arrived.errno, arrived.filename) == (2, "file")
    timeout = sent(RpcTimeout(0.1, "f on w2", "running"))
    assert isinstance(timeout, RpcTimeout)
    assert (timeout.timeout, timeout.call, timeout.state) == (0.1, "f on w2", "running")
    custom = sent(Custom(7, hint="x"))
    assert isinstance(custom, Custom)
    assert (custom.code, custom.hint) == (7, "x")


class OfAJob(Exception):
    original_type = "of the class"

    def __init__(self, worker: str) -> None:
        super().__init__(f"{worker} failed")
        self.worker = worker
        self.worker_id = 7


def test_attributes_of_the_original_win() -> None:
    for arrived, callee in ((sent(OfAJob("gpu-7")), HERE), (sent(sent(OfAJob("gpu-7")), FURTHER), FURTHER)):
        assert isinstance(arrived, OfAJob)
        assert isinstance(arrived, RemoteError)
        assert (arrived.worker, arrived.worker_id, arrived.original_type) == ("gpu-7", 7, "of the class")
        assert "raise error" in arrived.remote_traceback
        cause: Any = arrived.__cause__
        assert (cause.worker, cause.worker_id) == (callee.name, callee.id)
        assert cause.original_type.endswith("OfAJob")
        assert cause.remote_traceback == arrived.remote_traceback


@pytest.fixture
def drop_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.rpc", ModuleType("telegrad.compat.rpc"))


def test_text_is_the_users_message() -> None:
    for text in ("Expected error", "clé «ü» 鍵 \N{PARTY POPPER}", "\nfirst\n\tsecond \\ \x07", ""):
        arrived = sent(ValueError(text))
        assert str(arrived) == text
        assert isinstance(arrived, RemoteError)
        assert (arrived.worker, arrived.worker_id) == ("w1", 1)
        assert "raise error" in arrived.remote_traceback
    assert str(sent(KeyError("k"))) == "'k'"
    assert str(sent(OSError(2, "gone", "file"))) == "[Errno 2] gone: 'file'"


@pytest.mark.usefixtures("drop_in")
def test_drop_ins_text_has_torchs_form_and_names_the_worker() -> None:
    arrived = sent(ValueError("Expected error"))
    assert isinstance(arrived, RemoteError)
    assert str(arrived).startswith(
        "On WorkerInfo(id=1, name=w1):\nValueError('Expected error')\nTraceback (most recent"
    )
    assert "raise error" in str(arrived)
    assert describe_exception(ValueError("x"), HERE).startswith("On WorkerInfo(id=1, name=w1):\nValueError('x')\n")


@pytest.mark.usefixtures("drop_in")
def test_drop_ins_text_stays_whole() -> None:
    assert "KeyError('clé «ü» 鍵 \N{PARTY POPPER}')" in str(sent(KeyError("clé «ü» 鍵 \N{PARTY POPPER}")))
    assert "('\nfirst\n\tsecond \\ \x07')" in str(sent(ValueError("\nfirst\n\tsecond \\ \x07")))


def test_traceback_is_printed_once() -> None:
    printed = "".join(traceback.format_exception(sent(ValueError("told once"))))
    assert printed.count("raise error") == 1
    assert printed.count("told once") == 2  # by either end's traceback


def test_remote_traceback_is_chained() -> None:
    arrived = sent(KeyError("k"))
    assert isinstance(arrived.__cause__, RemoteTraceback)
    printed = "".join(traceback.format_exception(arrived))
    assert "on worker w1 (rank 1)" in printed
    assert printed.index("raise error") < printed.index("The above exception was the direct cause")


def test_a_third_worker_passes_the_type_on_and_both_are_named() -> None:
    arrived = sent(sent(CustomKeyError("k")), FURTHER)
    assert isinstance(arrived, CustomKeyError)
    assert isinstance(arrived, RemoteError)
    assert arrived.worker == "w2"
    assert "worker w1" in arrived.remote_traceback
    printed = "".join(traceback.format_exception(arrived))
    assert printed.index("on worker w2") < printed.index("on worker w1")


def test_constructor_that_takes_other_arguments_than_args() -> None:
    error = OtherArgs(True, "foo")
    for arrived in (sent(error), sent(sent(error), FURTHER), pickle.loads(pickle.dumps(sent(error)))):
        assert isinstance(arrived, OtherArgs)
        assert isinstance(arrived, RemoteError)
        assert arrived.args == ("foo!",)
        assert arrived.flag is True
        assert str(arrived) == "foo!"
        assert not hasattr(arrived, "__notes__")
    denied = sent(OtherArgsOfAnOSError("/x", "me"))
    assert isinstance(denied, OtherArgsOfAnOSError)
    assert (denied.args, denied.path) == (("me may not read /x",), "/x")


@pytest.mark.usefixtures("drop_in")
def test_drop_in_says_so_in_the_text() -> None:
    arrived = sent(OtherArgs(True, "foo"))
    assert str(arrived).startswith("On WorkerInfo(")
    assert "missing 1 required positional argument" in str(arrived)
    assert f"Original exception on remote side was {__name__}.OtherArgs" in str(arrived)


def local_class(*bases: type[Exception]) -> type[Exception]:
    class Local(*bases):  # type: ignore[misc]  # bases are dynamic
        def __init__(self, code: int, text: str) -> None:
            super().__init__(f"{code}: {text}")
            self.code = code

    return Local


@pytest.mark.parametrize("base", [Exception, ValueError, OSError, KeyError, RuntimeError])
def test_classes_that_cannot_be_found_by_name_keep_their_type(base: type[Exception]) -> None:
    kind = local_class(base)
    for arrived in (sent(kind(3, "why")), sent(sent(kind(3, "why")), FURTHER)):
        assert isinstance(arrived, kind)
        assert isinstance(arrived, RemoteError)
        assert arrived.code == 3
        assert arrived.args == ("3: why",)


def test_attributes_that_cannot_be_found_by_name_are_sent() -> None:
    error = ValueError("v")
    error.again = lambda: 5  # type: ignore[attr-defined]
    arrived: Any = sent(error)
    assert arrived.again() == 5


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ValueError(threading.Lock(), "foo"), "could not be pickled by the callee"),
        (MadeElsewhere("foo"), "MadeElsewhere pickles as cannot be raised on another worker"),
        (ExitsWhenPickled("foo"), "could not be pickled by the callee (SystemExit"),
    ],
    ids=lambda e: type(e).__name__ if isinstance(e, BaseException) else "",
)
def test_exceptions_that_cannot_be_rebuilt_arrive_as_remote_errors(
    error: BaseException, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arrived in (sent(error), sent(sent(error), FURTHER)):
        assert type(arrived) is RemoteError
        assert str(arrived).startswith(f"{_name(error)}: ")
        assert "foo" in str(arrived)
        (note,) = arrived.__notes__
        assert why in note
        assert str(copy.deepcopy(arrived)) == str(arrived)
    monkeypatch.setitem(sys.modules, "torch.distributed.rpc", ModuleType("telegrad.compat.rpc"))
    text = str(sent(error))
    assert text.startswith("Failed to create original exception type. Error msg was ")
    assert "Original exception on remote side was On WorkerInfo(" in text


def _name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_exits_arrive_as_one_sentence(kind: type[BaseException]) -> None:
    for arrived in (sent(kind("foo")), sent(sent(kind("foo")), FURTHER)):
        assert type(arrived) is RemoteError
        sentence = f"the call raised {kind.__name__}('foo') on worker w1, which ends neither that worker nor its caller"
        assert str(arrived) == sentence
        assert arrived.original_type.rpartition(".")[2] == kind.__name__


def test_own_frames_before_the_users_are_left_out() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run(divide, (1,), {})
    text = traceback_of(caught.value.with_traceback(caught.tb.tb_next))  # begins in telegrad, as a handler's does
    assert "in divide" in text
    assert "callables.py" not in text


def divide(x: int) -> float:
    return x / 0


def test_own_frames_stay_without_frames_of_the_user() -> None:
    with pytest.raises(AttributeError) as caught:
        method_of(None, "missing")
    assert "in method_of" in traceback_of(caught.value.with_traceback(caught.tb.tb_next))


def test_broken_repr_does_no_harm() -> None:
    arrived = sent(BrokenRepr())
    assert isinstance(arrived, BrokenRepr)
    assert "BrokenRepr: its repr() raised ValueError" in str(arrived)


def test_classes_are_made_once() -> None:
    assert type(sent(KeyError(1))) is type(sent(KeyError(2)))


def test_a_future_raises_it_each_time() -> None:
    future: Future[int] = Future()
    future.set_exception(sent(KeyError("k")))  # type: ignore[arg-type]
    for read in (future.wait, future.value, lambda: wait_all([future]), lambda: collect_all([future]).wait()):
        with pytest.raises(KeyError) as caught:
            read()
        assert isinstance(caught.value, RemoteError)
    with pytest.raises(RuntimeError, match="KeyError"):  # torch keeps only the text of what a callback raises
        future.then(lambda f: f.wait()).wait()


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class NoAttributes(Exception):
    """Exception with RemoteError's attribute names that forbids setting them."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.__dict__["_text"] = ["private"]

    @property
    def worker(self) -> str:
        return "a property"

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot set {name}")


@pytest.mark.parametrize("error", [Frozen(3), NoAttributes("no")], ids=lambda e: type(e).__name__)
def test_exceptions_that_forbid_setting_attributes(error: Exception) -> None:
    for arrived in (sent(error), sent(sent(error), FURTHER)):
        assert isinstance(arrived, type(error))
        assert isinstance(arrived, RemoteError)
        assert str(arrived) == str(error)
        assert {k: v for k, v in vars(error).items() if k in ("code", "_text")}.items() <= vars(arrived).items()
        assert isinstance(arrived.__cause__, RemoteTraceback)
    try:
        raise error
    except Exception as e:
        clear_frames(e, HERE)
    assert error.__traceback__ is None
    assert isinstance(clone_exception(error).__cause__, RemoteTraceback)


def test_frames_of_grouped_exceptions_are_released() -> None:
    try:
        divide(1)
    except ZeroDivisionError as e:
        part = e
    group = ExceptionGroup("several", [part])
    clear_frames(group, HERE)
    assert part.__traceback__ is None


class OfAScript(Exception):
    def data(self) -> Any:
        return _of_a_script


_of_a_script: Any = None


@pytest.mark.parametrize("script", ["__main__", "__mp_main__"])
def test_class_of_a_script_is_sent_without_the_data_of_its_methods(
    monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(OfAScript, "__module__", script)
    monkeypatch.setattr(OfAScript.data, "__module__", script)
    monkeypatch.setattr(sys.modules[script], "OfAScript", OfAScript, raising=False)
    assert b"cloudpickle" in pack_exception(OfAScript("x"), HERE)  # by value, too
    for data in (torch.zeros(100_000), list(range(100_000))):
        monkeypatch.setattr(sys.modules[__name__], "_of_a_script", data)
        packed = pack_exception(OfAScript("x"), HERE)
        assert b"cloudpickle" not in packed
        assert isinstance(unpack_exception(packed), OfAScript)


def test_own_frames_between_the_users_are_left_out() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run(lambda: run(divide, (1,), {}), (), {})
    assert "callables.py" not in traceback_of(caught.value)
    with pytest.raises(AttributeError) as missing:
        method_of(None, "missing")
    assert "in method_of" in traceback_of(missing.value)  # not a TelegradError: it may be a defect of Telegrad
    with pytest.raises(TelegradError) as refused:
        raise_refused()
    assert "uses.py" not in traceback_of(refused.value)


def raise_refused() -> None:
    run(_refuse, (), {})


def _refuse() -> None:
    raise TelegradError("no")


def test_exceptions_raised_again_have_own_frames_only_above_frames_of_the_user() -> None:
    with pytest.raises(AttributeError) as caught:
        method_of(None, "missing")
    own = caught.value.with_traceback(caught.tb.tb_next)
    assert strip_own_frames(own).__traceback__ is None
    with pytest.raises(ZeroDivisionError) as caught_below:
        run(divide, (1,), {})
    below = caught_below.value.with_traceback(caught_below.tb.tb_next)
    assert strip_own_frames(below).__traceback__ is not None
