"""Static check that one module loads pickles, behind a gate."""

import ast
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "telegrad"
GATE = SOURCES / "serialize" / "unpickling.py"

LOADERS = {
    "pickle": {"load", "loads", "Unpickler", "_Unpickler", "_load", "_loads"},
    "_pickle": {"load", "loads", "Unpickler"},
    "cloudpickle": {"load", "loads"},
    "dill": {"load", "loads"},
    "marshal": {"load", "loads"},
    "shelve": {"open"},
    "torch": {"load"},
    "torch.serialization": {"load"},
    "torch.package": {"PackageImporter"},
    "joblib": {"load"},
}
EVALUATORS = {"eval", "exec", "compile", "__import__"}


def loaders_in(source: str) -> list[str]:
    """Return the uses of functions that load pickles or run text as code."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                modules[name.asname or name.name] = name.name
        elif isinstance(node, ast.ImportFrom):
            found += [
                f"{node.module}.{name.name}" for name in node.names if name.name in LOADERS.get(str(node.module), ())
            ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            module = modules.get(ast.unparse(node.value), ast.unparse(node.value))
            if node.attr in LOADERS.get(module, ()):
                found.append(f"{module}.{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in EVALUATORS:
            found.append(node.func.id)
    return found


def test_only_the_gate_loads_pickles() -> None:
    sources = sorted(SOURCES.rglob("*.py"))
    assert len(sources) > 200
    found = {str(path.relative_to(SOURCES)): loaders_in(path.read_text()) for path in sources}
    assert {path for path, uses in found.items() if uses} == {"serialize/unpickling.py"}


def test_the_gate_loads_them_in_two_places() -> None:
    assert sorted(loaders_in(GATE.read_text())) == ["pickle.Unpickler", "pickle.loads"]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b'')",
        "import pickle as p\np.Unpickler(f)",
        "from pickle import loads",
        "from cloudpickle import load as get",
        "import torch\ntorch.load(f)",
        "import marshal\nread = marshal.loads",
        "eval('1')",
        "__import__('pickle')",
    ],
)
def test_the_check_finds_loaders(source: str) -> None:
    assert loaders_in(source)


def test_the_check_passes_other_functions() -> None:
    assert not loaders_in("import json, pickle\njson.loads('1')\npickle.dumps(1)\nmodel.eval()\nre.compile('a')")
