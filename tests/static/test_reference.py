"""The reference has every public name of every public module."""

import importlib
import inspect
import re

import documents
import pytest

PAGES = {page.stem: page for page in (documents.REPO / "docs" / "reference").glob("[a-z]*.md")}

# Names of torch, or of modules that the reference describes on another page.
LEFT_OUT = {
    "rpc": {"BackendType", "api", "functions", "options"},
    "optim": {
        "PostLocalSGDOptimizer",
        "ZeroRedundancyOptimizer",
        "as_functional_optim",
        "functional_optim_map",
        "register_functional_optim",
    },
    "nn": {
        "functional", "all_gather", "all_reduce", "all_to_all", "all_to_all_single", "broadcast", "gather", "reduce",
        "reduce_scatter", "scatter",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_reference_has_every_public_name(name: str) -> None:
    names = documents.reference_names(PAGES[name].read_text())
    shown = [each.removeprefix(f"telegrad.{name}.") for each in names]
    public = set(importlib.import_module(f"telegrad.{name}").__all__) - LEFT_OUT.get(name, set())
    assert len(shown) == len(set(shown))
    assert public <= set(shown)
    for each in shown:
        found = importlib.import_module(f"telegrad.{name}")
        for part in each.split("."):
            found = getattr(found, part)


def test_every_public_module_has_a_page() -> None:
    modules = {"autograd", "compat", "errors", "nn", "observe", "optim", "rpc", "testing"}
    assert set(PAGES) == modules


def test_no_entry_is_a_module_instead_of_what_it_exports() -> None:
    """The reference needs no imports, even if a module hides a function."""
    entries = [path for page in PAGES.values() for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
    hidden = [
        path
        for path in entries
        if not inspect.ismodule(getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2], 0))
        and (documents.REPO / "src" / f"{path.replace('.', '/')}.py").exists()
    ]
    assert len(entries) > 50
    assert hidden == []
