"""Exceptions of handlers with ``allow_pickle=False``: they travel as plain data."""

import os
import threading
from importlib import import_module
from typing import Any

import pytest
import torch

from telegrad import errors, rpc
from telegrad.errors import RemoteError, SerializationError
from telegrad.serialize import plain_exceptions
from telegrad.serialize.exceptions import unpack_exception
from telegrad.serialize.plain_data import Record
from telegrad.serialize.plain_fields import decode_fields, encode_fields
from telegrad.serialize.unpickling import PickleGate
from telegrad.testing import Cluster


class Custom(Exception):
    pass


def fail(kind: str, *args: Any) -> None:
    if kind == "Custom":
        raise Custom(*args)
    if kind == "WorkerLost":
        raise errors.WorkerLost("w7", "it was unplugged", 3)
    raise {"KeyError": KeyError, "ValueError": ValueError, "OSError": OSError, "SystemExit": SystemExit}[kind](*args)


def test_exceptions_of_python_and_of_telegrad_keep_their_types(strict: Cluster) -> None:
    with pytest.raises(KeyError) as caught:
        rpc.rpc_sync("w1", fail, ("KeyError", "key"))
    error: Any = caught.value
    assert (error.args, error.worker, error.original_type) == (("key",), "w1", "KeyError")
    assert "in fail" in error.remote_traceback
    with pytest.raises(OSError) as of_system:
        rpc.rpc_sync("w1", fail, ("OSError", 2, "no such thing"))
    assert of_system.value.errno == 2
    with pytest.raises(errors.WorkerLost) as lost:
        rpc.rpc_sync("w1", fail, ("WorkerLost",))
    assert (lost.value.name, lost.value.incarnation) == ("w7", 3)


def test_other_exceptions_come_as_texts(strict: Cluster) -> None:
    with pytest.raises(RemoteError, match="Custom: some text") as caught:
        rpc.rpc_sync("w1", fail, ("Custom", "some text"))
    error: Any = caught.value
    assert type(error) is RemoteError
    assert error.original_type.endswith("Custom")
    assert "in fail" in error.remote_traceback
    assert any("allow_pickle=False" in note for note in error.__notes__)
    with pytest.raises(RemoteError):
        rpc.rpc_sync("w1", fail, ("SystemExit", 1))
    with pytest.raises(RemoteError, match="Custom"):
        list(rpc.map("w1", fail, ["Custom"]))


@pytest.mark.parametrize("fields", [[], ["s"], ["a"] * 20, [1] * 10, [b"x"] * 10], ids=repr)
def test_malformed_exceptions(fields: list[Any]) -> None:
    data = encode_fields(fields)
    assert decode_fields(data) == fields
    with pytest.raises(SerializationError):
        unpack_exception(data, PickleGate(False))
    for cut in (1, 5, 9):
        with pytest.raises(SerializationError):
            unpack_exception(data[:-cut] or b"x", PickleGate(False))


def fail_with_facts(kind: str) -> None:
    if kind == "import":
        import_module("no_such_module_of_telegrad")
    if kind == "rename":
        os.rename("/no/such/file", "/no/other/file")
    error = ValueError("with a note")
    error.add_note("the note")
    raise error


def test_exceptions_of_python_keep_what_their_args_do_not_have(strict: Cluster) -> None:
    with pytest.raises(ValueError, match="with a note") as noted:
        rpc.rpc_sync("w1", fail_with_facts, ("note",))
    assert noted.value.__notes__ == ["the note"]
    with pytest.raises(ModuleNotFoundError) as missing:
        rpc.rpc_sync("w1", fail_with_facts, ("import",))
    assert missing.value.name == "no_such_module_of_telegrad"
    with pytest.raises(FileNotFoundError) as unfound:
        rpc.rpc_sync("w1", fail_with_facts, ("rename",))
    error = unfound.value
    assert (error.args, error.filename) == ((2, "No such file or directory"), "/no/such/file")
    assert error.filename2 == "/no/other/file"
    assert str(error) == "[Errno 2] No such file or directory: '/no/such/file' -> '/no/other/file'"


SHARED = [1]
ERRORS: dict[str, tuple[Exception, str]] = {
    "set": (ValueError({1}), "({1},)"),
    "dtype": (KeyError(torch.float32), "(torch.float32,)"),
    "size": (TypeError(torch.ones(2).shape), "(torch.Size([2]),)"),
    "one list twice": (ValueError(SHARED, SHARED), "([1], [1])"),
    "contained": (ValueError(KeyError(1), [OSError(2, "x", "f")]), "(KeyError(1), [FileNotFoundError(2, 'x')])"),
    "type": (TypeError(int, 5), "(\"<class 'int'>\", 5)"),
    "tensor": (ValueError("x", torch.ones(2)), "('x', 'tensor([1., 1.])')"),
    "surrogate": (KeyError("\udc80"), "('\\udc80',)"),
    "unicode": (UnicodeEncodeError("utf8", "\udc80", 0, 1, "no"), "('utf8', '\\udc80', 0, 1, 'no')"),
}


def fail_with(name: str) -> None:
    raise ERRORS[name][0]


@pytest.mark.parametrize("name", ERRORS)
def test_exceptions_of_python_keep_their_types_whatever_their_arguments(strict: Cluster, name: str) -> None:
    error, args = ERRORS[name]
    with pytest.raises(type(error)) as caught:
        rpc.rpc_sync("w1", fail_with, (name,))
    assert repr(caught.value.args) == args
    assert not hasattr(caught.value, "__notes__")
    if name == "unicode":
        assert str(caught.value) == str(error)


class BrokenRepr:
    def __repr__(self) -> str:
        raise KeyError("no")


def fail_with_attributes() -> None:
    error: Any = KeyError(BrokenRepr())
    error.numbers = {1}
    error.lock = threading.Lock()
    raise error


def test_attributes_that_cannot_be_sent_are_named(strict: Cluster) -> None:
    with pytest.raises(KeyError) as caught:
        rpc.rpc_sync("w1", fail_with_attributes)
    error: Any = caught.value
    assert error.args == ("<BrokenRepr>",)
    assert error.numbers == {1}
    assert not hasattr(error, "lock")
    assert "Its attributes (lock) were not sent: they are not plain data" in error.__notes__[0]


def fail_with_a_group() -> None:
    raise ExceptionGroup(
        "group", [ValueError(1), ExceptionGroup("inner", [Custom("x")]), errors.WorkerLost("w7", "no")]
    )


def test_groups_keep_their_parts(strict: Cluster) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        rpc.rpc_sync("w1", fail_with_a_group)
    value, inner, lost = caught.value.exceptions
    assert repr(value) == "ValueError(1)"
    assert (type(lost), lost.name) == (errors.WorkerLost, "w7")  # type: ignore[union-attr]
    assert type(inner) is ExceptionGroup
    assert [type(each) for each in inner.exceptions] == [RemoteError]
    assert str(inner.exceptions[0]).endswith("Custom: x")


def test_malformed_contained_exceptions_arrive_as_texts() -> None:
    for part in (("x", {}), ((), 5), 7, ((1, 2, 3), {})):
        record = Record("builtins:UnicodeDecodeError", part)
        coded = plain_exceptions._codec.encode(record)
        assert coded is not None
        outer = plain_exceptions._codec.encode(([coded[0]], {}))
        assert outer is not None
        fields = ["w1", 1, "ValueError", "ValueError(...)", "...", "", None, "", None, outer[0], ""]
        error = unpack_exception(encode_fields(fields), PickleGate(False))  # type: ignore[arg-type]
        assert type(error) is RemoteError
