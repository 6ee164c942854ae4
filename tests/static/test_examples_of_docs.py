"""Every name of the reference has an example; it and the code of the guide run."""

import ast
import asyncio
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import documents
import pytest
from free_ports import free_port

from telegrad.testing import cluster
from telegrad.worker.serving.exposure import exposed

FOLDER = documents.REPO / "docs" / "reference"
PRELUDE = next(b.text for b in documents.split((FOLDER / "README.md").read_text())[0] if b.language == "python")
NO_GROUP = re.compile(r"\bcluster\(|from telegrad\.testing import|NotInitialized")
OWN_PROCESS = re.compile(
    r"\binit_rpc\(|rpc\.Worker\(|\b[Pp]rocesses\(|\bcompat\.(un)?install|\bcompat\.child|\bregister_backend\(|\bbasicConfig\("
)
FIRST_OF_SEVERAL = re.compile(r'"([a-z]+)0", rank=0, world_size=(\d+)')

OTHER_RANKS = """
def join(rank):
    rpc.Worker(f"{name}{{rank}}", rank=rank, world_size={size}).shutdown()

for rank in range(1, {size}):
    threading.Thread(target=join, args=(rank,)).start()
"""


def names() -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes of the reference, with their names."""
    for page in sorted(FOLDER.glob("[a-z]*.md")):
        for entry in documents.reference_names(page.read_text()):
            path = entry.removeprefix("telegrad.")
            found = importlib.import_module(f"telegrad.{page.stem}")
            for part in path.split(".")[1:]:
                found = getattr(found, part)
            if not inspect.ismodule(found):
                yield path, found
                continue
            for name in getattr(found, "__all__", ()):
                if callable(member := getattr(found, name)) and member.__module__ == found.__name__:
                    yield f"{path}.{name}", member


NAMES = [(path, found) for path, found in names() if path != "rpc.backend_registry.BackendType"]  # an Enum


def example_of(found: Any) -> str:
    """Return the code of the docstring's section Example; empty if it has none."""
    match = re.search(r"^Example::\n((?:[ \t]+.*\n?|\n)+)", inspect.getdoc(found) or "", re.MULTILINE)
    return textwrap.dedent(match[1]).strip("\n") + "\n" if match else ""


def blocks() -> Iterator[tuple[str, str]]:
    """Yield the Python blocks of the guide, with their places."""
    for page in sorted((documents.REPO / "docs").glob("*.md")):
        for block in documents.split(page.read_text())[0]:
            if block.language == "python" and "store=store" not in block.text:  # a list of alternatives
                yield f"{page.name}:{block.line}", block.text


EXAMPLES = [*((name, example_of(found)) for name, found in NAMES), *blocks()]
IN_GROUP = [pytest.param(name, code, id=name) for name, code in EXAMPLES if not OWN_PROCESS.search(code)]
ALONE = [pytest.param(code, id=name) for name, code in EXAMPLES if OWN_PROCESS.search(code)]


def test_the_guide_has_blocks() -> None:
    assert len(list(blocks())) >= 10


@pytest.mark.parametrize("found", [pytest.param(found, id=name) for name, found in NAMES])
def test_the_name_has_an_example(found: Any) -> None:
    assert example_of(found)


@pytest.mark.parametrize(("name", "code"), IN_GROUP)
def test_it_runs(name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"example_{re.sub(r'[^a-z0-9]', '_', name)}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # so that handlers find its functions by name
    monkeypatch.setattr(exposed, "_names", set())  # what an example exposes ends with it
    monkeypatch.setattr(exposed, "_patterns", set())
    exec(PRELUDE, module.__dict__)
    compiled = compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    with nullcontext() if NO_GROUP.search(code) else cluster(3, names="worker{}", check=False):
        if compiled.co_flags & inspect.CO_COROUTINE:
            asyncio.run(types.FunctionType(compiled, module.__dict__)())
        else:
            exec(compiled, module.__dict__)


@pytest.mark.slow
@pytest.mark.parametrize("code", ALONE)
def test_it_runs_as_a_program(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks of its group, if it has any, are threads."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    others = FIRST_OF_SEVERAL.search(code)
    join = OTHER_RANKS.format(name=others[1], size=others[2]) if others else ""
    program = tmp_path / "program.py"
    program.write_text(PRELUDE + join + code)
    run = subprocess.run(
        [sys.executable, program.name], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
