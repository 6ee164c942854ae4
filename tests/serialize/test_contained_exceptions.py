"""Exceptions that contain other exceptions, or attributes that cannot be sent."""

import threading
from typing import Any

import pytest

from telegrad import rpc
from telegrad.errors import RemoteError
from telegrad.serialize.exceptions import pack_exception, unpack_exception
from telegrad.testing import Cluster
from telegrad.types import WorkerInfo


@pytest.mark.parametrize("notes", [5, "abc", [1]])
def test_notes_that_are_no_list_of_texts(notes: Any) -> None:
    error = ValueError("x")
    error.__notes__ = notes
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    (note,) = sent(error).__notes__
    assert note.startswith("Its attributes (lock) were not sent")


class Coded(Exception):
    def __init__(self, *, code: int, **attributes: Any) -> None:
        super().__init__()
        self.code = code
        self.__dict__.update(attributes)


def with_inner(inner: Exception) -> Exception:
    error = ValueError("outer")
    error.inner = inner  # type: ignore[attr-defined]
    return error


def sent(error: Exception, worker: str = "w1") -> Any:
    try:
        raise error
    except Exception as e:
        return unpack_exception(pack_exception(e, WorkerInfo(worker, 1)))


CONTAINERS = {
    "group": (lambda inner: ExceptionGroup("g", [inner]), lambda error: error.exceptions[0]),
    "nested group": (
        lambda inner: ExceptionGroup("g", [KeyError(1), ExceptionGroup("h", [inner])]),
        lambda error: error.exceptions[1].exceptions[0],
    ),
    "argument": (lambda inner: ValueError("a", inner), lambda error: error.args[1]),
    "attribute": (with_inner, lambda error: error.inner),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_contained_exceptions_with_another_constructor_keep_their_type(container: str) -> None:
    wrap, unwrap = CONTAINERS[container]
    for arrived in (sent(wrap(Coded(code=4))), sent(sent(wrap(Coded(code=4))), "w2")):
        assert isinstance(arrived, RemoteError)
        assert isinstance(arrived, type(wrap(ValueError())))
        inner = unwrap(arrived)
        assert type(inner) is Coded
        assert inner.code == 4
        assert not hasattr(arrived, "__notes__")


def test_a_group_can_be_caught_by_the_types_of_its_exceptions() -> None:
    caught: list[int] = []
    try:
        raise sent(ExceptionGroup("g", [Coded(code=4)]))
    except* Coded as group:
        caught += [each.code for each in group.exceptions if isinstance(each, Coded)]
    assert caught == [4]


def test_an_exception_may_contain_itself() -> None:
    error = ValueError("me")
    error.me = error  # type: ignore[attr-defined]
    arrived = sent(error)
    assert isinstance(arrived, ValueError)
    assert arrived.me.args == ("me",)  # type: ignore[attr-defined]


def test_only_attributes_that_cannot_be_pickled_are_omitted() -> None:
    arrived = sent(Coded(code=7, lock=threading.Lock(), detail="d", other=threading.Lock()))
    assert isinstance(arrived, Coded)
    assert (arrived.code, arrived.detail) == (7, "d")  # type: ignore[attr-defined]
    assert not hasattr(arrived, "lock")
    (note,) = arrived.__notes__
    assert note.startswith("Its attributes (lock, other) were not sent: they could not be pickled by the callee (")


def test_attributes_of_contained_exceptions_are_omitted_as_well() -> None:
    arrived = sent(ExceptionGroup("g", [Coded(code=7, lock=threading.Lock())]))
    (inner,) = arrived.exceptions
    assert isinstance(inner, Coded)
    assert inner.code == 7
    assert "(lock)" in arrived.__notes__[0]


def raises_with_reference() -> None:
    error = ValueError("r")
    error.code, error.reference = 3, rpc.RRef(5)  # type: ignore[attr-defined]
    raise error


@pytest.mark.usefixtures("quiet")
def test_a_reference_in_an_exception_is_named(clean: Cluster) -> None:
    with pytest.raises(ValueError, match="r") as raised:
        rpc.rpc_sync("w1", raises_with_reference)
    arrived: Any = raised.value
    assert arrived.code == 3
    (note,) = arrived.__notes__
    assert note.startswith("Its attributes (reference) were not sent: ")
    assert "return it, or send its value" in note


def test_a_group_that_several_workers_forward_has_each_traceback_once() -> None:
    error: Exception = KeyError("bottom")
    for level in range(12):
        error = sent(ExceptionGroup(f"level {level}", [error]), f"w{level}")
    text = error.remote_traceback  # type: ignore[attr-defined]
    assert text.count("KeyError: 'bottom'") == 1
    assert all(f"level {level}" in text for level in range(12))
    assert len(text) < 40_000
