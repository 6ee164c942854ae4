"""The public names of telegrad.rpc have complete docstrings."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from telegrad import rpc

FIRST_LINE = 80  # characters
CLASSES = (rpc.CallFuture, rpc.RRef, rpc.Worker, rpc.WorkerInfo, rpc.Options, rpc.RpcBackendOptions)
MODULES = (rpc, rpc.functions, rpc.backend_registry)
NOT_IN_ALL = ["map"]  # public, but `import *` must not hide Python's own
NO_IMPERATIVE = re.compile(r"^(What|Who|It|The same|As|One|Whether|\w+[^s]s)\b")


def public_functions() -> list[tuple[str, Callable[..., Any]]]:
    found: dict[str, Callable[..., Any]] = {}
    for holder in (*MODULES, *CLASSES):
        names = (NOT_IN_ALL if holder is rpc else []) + getattr(holder, "__all__", []) or [
            name for name in vars(holder) if not name.startswith("_")
        ]
        for name in names:
            member = getattr(holder, name) if inspect.ismodule(holder) else inspect.getattr_static(holder, name)
            if isinstance(member, classmethod | staticmethod):
                member = member.__func__
            if inspect.isfunction(member) and member.__module__.startswith("telegrad"):
                found[f"{holder.__name__.removeprefix('telegrad.')}.{name}"] = member
    return sorted(found.items())


FUNCTIONS = public_functions()
in_each = pytest.mark.parametrize(("name", "function"), FUNCTIONS, ids=[name for name, _ in FUNCTIONS])


def parameters_of(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def section(text: str, title: str) -> str:
    """Return the lines of a section of a docstring; empty if it has none."""
    found = re.search(rf"^{title}:+\n((?:[ \t]+.*\n?|\n)*)", text, re.MULTILINE)
    return found[1] if found else ""


def test_all_public_names_are_checked() -> None:
    names = {name for name, _ in FUNCTIONS}
    assert {"rpc.rpc_sync", "rpc.call", "rpc.wait_all", "RRef.to_here", "Worker.call", "CallFuture.then"} <= names


@in_each
def test_the_first_line_is_a_summary(name: str, function: Callable[..., Any]) -> None:
    lines = (inspect.getdoc(function) or "").splitlines()
    assert lines, "no docstring"
    assert len(lines[0]) <= FIRST_LINE
    assert lines[0].endswith("."), "the first sentence goes on"
    assert lines[1:2] in ([], [""])
    assert not NO_IMPERATIVE.match(lines[0]), "begin with an imperative"


@in_each
def test_parameters_are_described(name: str, function: Callable[..., Any]) -> None:
    text = inspect.getdoc(function) or ""
    if re.search(r"`telegrad\.rpc\.\w+`", text.splitlines()[0]):  # that function describes them
        return
    told = section(text, "Args")
    missing = [p for p in parameters_of(function) if not re.search(rf"^ *(\w+, )*{p}(, \w+)*:", told, re.MULTILINE)]
    assert not missing


@pytest.mark.parametrize("name", sorted({*rpc.__all__, *NOT_IN_ALL} - {"is_available"}))
def test_main_functions_have_errors_and_an_example(name: str) -> None:
    function = getattr(rpc, name)
    if not inspect.isfunction(function):
        return
    text = inspect.getdoc(function) or ""
    assert section(text, "Raises")
    assert section(text, "Example")
    if inspect.signature(function).return_annotation is not None:
        assert section(text, "Returns")
