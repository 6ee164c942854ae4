"""Imports of one package's modules in several threads."""

import importlib._bootstrap
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from telegrad.serialize.function_names import resolve
from telegrad.serialize.module_imports import import_parents_first
from telegrad.testing import eventually

PACKAGE = """
import {name}_events
{name}_events.entered.set()
assert {name}_events.opened.wait(30)
from {name} import child
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Package whose import waits for an event, and then imports its submodule."""
    name = "package_of_test"
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE.format(name=name))
    (folder / "child.py").write_text("def function():\n    return 5\n")
    (tmp_path / f"{name}_events.py").write_text(
        "import threading\nentered, opened = threading.Event(), threading.Event()\n"
    )
    yield name
    for one in [one for one in sys.modules if one.startswith(name)]:
        del sys.modules[one]


@pytest.mark.parametrize(
    "importing",
    [
        lambda name: import_parents_first(f"{name}.child").function,
        lambda name: resolve(f"G{name}.child\0function".encode()),
    ],
    ids=["import", "resolve"],
)
def test_a_submodule_while_another_thread_imports_its_package(package: str, importing: Callable[[str], Any]) -> None:
    events = importlib.import_module(f"{package}_events")
    results = list[Any]()

    def run(function: Callable[[], object]) -> threading.Thread:
        def collect() -> None:
            try:
                results.append(function())
            except BaseException as error:
                results.append(error)

        thread = threading.Thread(target=collect)
        thread.start()
        return thread

    first = run(lambda: importlib.import_module(package).child.function())
    assert events.entered.wait(30)
    second = run(lambda: importing(package)())
    blocked: Any = importlib._bootstrap._blocking_on  # type: ignore[attr-defined]
    eventually(lambda: bool(blocked.get(second.ident)))
    events.opened.set()
    first.join()
    second.join()
    assert results == [5, 5]


def test_a_module_that_does_not_exist() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"):
        import_parents_first("no_such_package.child")
