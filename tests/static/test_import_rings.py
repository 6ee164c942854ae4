"""No ring of imports spans more than three files, imports for types included."""

import ast
from collections.abc import Iterator
from pathlib import Path

import telegrad

ROOT = Path(telegrad.__file__).parent
LIMIT = 3  # files


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: set[str]) -> Iterator[str]:
    """Yield the modules that a file imports, wherever the import is."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name in modules:
                yield name
            elif name.rpartition(".")[0] in modules:
                yield name.rpartition(".")[0]


def graph() -> dict[str, set[str]]:
    files = {module_of(path): path for path in ROOT.rglob("*.py")}
    found = {name: set(imports_of(path, set(files))) - {name} for name, path in files.items()}
    del found["telegrad"]  # imports its parts on first use
    return {name: imported - {"telegrad"} for name, imported in found.items()}


def rings(imported: dict[str, set[str]]) -> list[frozenset[str]]:
    """Return the strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(imported[name]):
            if other not in imported:
                continue
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            ring = frozenset(stack[stack.index(name) :])
            del stack[stack.index(name) :]
            if len(ring) > 1:
                found.append(ring)

    for name in imported:
        if name not in index:
            visit(name)
    return found


def test_no_ring_of_imports_is_large() -> None:
    assert [sorted(ring) for ring in rings(graph()) if len(ring) > LIMIT] == []


def test_rings_are_found() -> None:
    assert rings({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [frozenset("abc")]
