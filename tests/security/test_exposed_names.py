"""Tests of the arguments of `rpc.expose`, and of what its patterns match."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from trust_helpers import double

from telegrad import rpc
from telegrad.worker.serving.exposure import ExposedNames


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


def test_a_wrong_option() -> None:
    with pytest.raises(ValueError, match="expose has to be all or listed"):
        rpc.Options(expose="some")
