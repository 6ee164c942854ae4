"""Types of programs with ``allow_pickle=False``."""

import dataclasses
import functools
from typing import Any

import pytest

from telegrad import rpc
from telegrad.errors import SerializationError
from telegrad.serialize.pickling import Serializer
from telegrad.serialize.plain_data import unpack_dataclass
from telegrad.testing import Cluster


class Plain:
    def __init__(self, x: int) -> None:
        self.x = x


@dataclasses.dataclass(frozen=True)
class Processed:
    x: int
    extra: dataclasses.InitVar[int]

    def __post_init__(self, extra: int) -> None:
        object.__setattr__(self, "x", self.x + extra)
        object.__setattr__(self, "label", f"label {self.x}")

    @functools.cached_property
    def total(self) -> int:
        return self.x


def echo(value: Any) -> Any:
    return value


def test_a_class_of_a_script_has_two_names_in_a_spawned_process(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, child = Serializer(), Serializer()
    for module, serializer in (("__main__", parent), ("__mp_main__", child)):
        monkeypatch.setattr(Plain, "__module__", module)
        serializer.plain.register(Plain, lambda plain: plain.x, Plain)
    for sender, receiver in ((parent, child), (child, parent)):
        body, _ = sender.codec.encode(sender.plain.convert(Plain(3), "value", False))  # type: ignore[misc]
        assert receiver.codec.decode(body, []).x == 3


def test_the_constructor_of_a_dataclass_does_not_run_again(strict: Cluster) -> None:
    for worker in strict:
        with worker:
            rpc.register_type(Processed)
    value = Processed(1, 2)
    assert value.total == 3  # read once: it is kept in the object
    found = rpc.rpc_sync("w1", echo, (value,))
    assert (found, found.label, found.total) == (value, "label 3", 3)


@pytest.mark.parametrize("name", ["total", "__class__", 1])
def test_a_dataclass_gets_no_attribute_of_its_class(name: Any) -> None:
    with pytest.raises(SerializationError, match="other fields"):
        unpack_dataclass(Processed, {"x": 1, name: 5})
