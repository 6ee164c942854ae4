"""Tests of the arguments of `rpc.expose`, and of what its patterns match."""

import functools
import sys
from typing import Any

import pytest
import torch
from torch import nn
from trust_helpers import Net, double

from telegrad import rpc
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
