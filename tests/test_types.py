import copy
import pickle

import pytest

from telegrad.types import WorkerInfo


def test_is_a_value() -> None:
    info = WorkerInfo("w1", 1)
    assert info == WorkerInfo(name="w1", id=1)
    assert info != WorkerInfo("w1", 2)
    assert info != WorkerInfo("w2", 1)
    assert info != ("w1", 1)
    assert {info: 5}[WorkerInfo("w1", 1)] == 5
    assert repr(info) == str(info) == "WorkerInfo(id=1, name=w1)"
    assert pickle.loads(pickle.dumps(info)) == copy.deepcopy(info) == info


def test_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        WorkerInfo("w1", 1).name = "w2"  # type: ignore[misc]
    assert not hasattr(WorkerInfo("w1", 1), "__dict__")


@pytest.mark.parametrize("name", ["a", "A-z_0:9", "a" * 127])
def test_good_names(name: str) -> None:
    assert WorkerInfo(name, 0).name == name


@pytest.mark.parametrize("name", ["", " ", "abc*", "é", "a\n", "a" * 128])
def test_bad_names(name: str) -> None:
    with pytest.raises(
        RuntimeError, match=r"Worker name must match .*, and must be non-empty and shorter than 128 chars"
    ):
        WorkerInfo(name, 0)


@pytest.mark.parametrize("number", [32767, -1, True])
def test_good_ids(number: int) -> None:
    assert type(WorkerInfo("a", number).id) is int


@pytest.mark.parametrize(
    ("name", "number"), [("a", 32768), ("a", -32769), ("a", 1.5), ("a", "1"), (b"a", 1), (None, 1)]
)
def test_wrong_kinds(name: str, number: int) -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        WorkerInfo(name, number)
