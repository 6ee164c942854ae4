"""Tests of the arguments of `rpc.expose`, and of what its patterns match."""

import functools
import os
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import nn
from trust_helpers import Net, double

from telegrad import rpc
from telegrad.errors import NotExposed
from telegrad.worker.serving.exposure import AllowList, ExposedNames


@pytest.mark.parametrize("target", ["", "module", ":name", "module:", "a:b:c"])
def test_texts_of_another_form(target: str) -> None:
    with pytest.raises(ValueError, match=r"package\.module:name"):
        rpc.expose(target)


@pytest.mark.parametrize("target", [lambda: 1, [].append, torch.ones(1).add], ids=["lambda", "bound", "tensor"])
def test_targets_without_a_name(target: Any) -> None:
    with pytest.raises(ValueError, match="cannot be exposed"):
        rpc.expose(target)


@pytest.mark.parametrize(
    "target", [1, None, functools.partial(double), nn.ReLU()], ids=["int", "None", "partial", "module"]
)
def test_targets_that_are_no_functions(target: Any) -> None:
    with pytest.raises(TypeError, match=r"rpc\.expose takes"):
        rpc.expose(target)


def test_wildcards_match_neither_dots_nor_underscores() -> None:
    names = ExposedNames()
    names.add("package.*", "get_*")
    names.add("package", "*")
    assert names.has_pattern(("package.a", "get_b"))
    for path in [("package.a", "get.b"), ("package.a.b", "get_c"), ("package._a", "get_b"), ("package.", "get_b")]:
        assert not names.has_pattern(path)
    for path in [("package", "_f"), ("package", "a.b"), ("package", ""), ("", "f")]:
        assert not names.has_pattern(path)
    assert names.has_pattern(("package", "f"))


def test_a_script_has_two_names_in_a_spawned_process() -> None:
    names = ExposedNames()
    for module, other in (("__main__", "__mp_main__"), ("__mp_main__", "__main__")):
        names.add(module, "predict")
        names.add(module, "get_*")
        assert names.has_name((other, "predict"))
        assert names.has_pattern((other, "get_x"))
        AllowList("w1", names).admit(f"G{other}\0predict".encode())
        names.remove(module, "predict")
        names.remove(module, "get_*")
        assert not names.has_name((other, "predict"))
        assert not names.has_pattern((other, "get_x"))


def test_a_pattern_covers_a_function_that_a_spawned_process_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(double, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "double", double, raising=False)
    names = ExposedNames()
    names.add("__main__", "dou*")
    assert AllowList("w1", names).find_function(b"G__mp_main__\0double") is double


class Borrowing:
    loads = pickle.loads
    getpid = staticmethod(os.getpid)
    dump = functools.partial(pickle.dumps)
    linear = nn.Linear
    limit = 5

    def method(self) -> int:
        return 1

    @classmethod
    def of_class(cls) -> int:
        return 2

    @staticmethod
    @functools.lru_cache
    def cached() -> int:
        return 3

    @property
    def of_object(self) -> int:
        return 4

    class Inner:
        pass


def test_an_exposed_class_does_not_expose_functions_of_other_modules() -> None:
    names = ExposedNames()
    names.add(__name__, "Borrowing.*")
    policy, value = AllowList("w1", names), Borrowing()
    for name in ("loads", "getpid", "dump", "linear"):
        for find in (policy.method_of, policy.read):
            with pytest.raises(NotExposed, match=f"does not expose '{name}'"):
                find(value, name)
    assert [policy.method_of(value, name)() for name in ("method", "of_class", "cached")] == [1, 2, 3]
    assert type(policy.method_of(value, "Inner")()) is Borrowing.Inner
    assert [policy.read(value, name) for name in ("of_object", "limit")] == [4, 5]
    names.add(__name__, "Borrowing.getpid")
    assert policy.method_of(value, "getpid")() == os.getpid()


@pytest.mark.parametrize(("kind", "name"), [(nn.Linear, "forward"), (torch.Tensor, "backward"), (list, "append")])
def test_classes_of_libraries_expose_their_methods(kind: Any, name: str) -> None:
    names = ExposedNames()
    names.add(kind.__module__, f"{kind.__qualname__}.*")
    AllowList("w1", names).method_of(kind, name)


def test_a_wrong_option() -> None:
    with pytest.raises(ValueError, match="expose has to be all or listed"):
        rpc.Options(expose="some")


def test_a_name_also_exposes_the_place_of_definition() -> None:
    names = ExposedNames()
    names.add("torch.nn", "Linear")
    assert names.has_name(("torch.nn.modules.linear", "Linear"))
    for path in ("Bilinear", "Linear.forward", "Linear.*"):
        assert not names.has_name(("torch.nn.modules.linear", path))
    names.remove("torch.nn", "Linear")
    assert not names.has_name(("torch.nn.modules.linear", "Linear"))
    names.add("torch.nn", "Linear.forward")
    assert names.has_name(("torch.nn.modules.linear", "Linear.forward"))
    assert not names.has_name(("torch.nn.modules.linear", "Linear"))


def test_names_that_expose_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "borrowed", Net.forward, raising=False)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    names = ExposedNames()
    for name in ("borrowed", "Net.apply", "missing", "double.missing", "Plain.forward"):  # `apply` is inherited
        names.add(__name__, name)
    names.add("colorsys", "rgb_to_hsv")
    assert names._places == set()
    assert "colorsys" not in sys.modules


class Plain(Net):
    """Class that is defined in this module: its name is its place."""

    def forward(self, x: Any) -> Any:
        return x
