"""Checker of import rules that import-linter cannot express.

pyproject.toml has the contracts of import-linter. Two rules here are for Python (`breaches`), one for C++
(`core_breaches`):

1. Only the parts in `NATIVE` import the compiled core.
2. Only the compatibility shim imports `torch.distributed.rpc` and related modules. Tests and benchmarks compare with
   torch, so they are exempt.
3. The core does not include PyTorch or CUDA. Its folders form layers (`LAYERS`), and those below the bindings do not
   include Python either.

All imports count: inside functions, under `TYPE_CHECKING`, and in `importlib.import_module("...")`.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

ROOT = "telegrad"
NATIVE = {"serialize", "worker", "autograd", "testing"}

TORCH_RPC = ("torch.distributed.rpc", "torch.distributed.autograd")
TORCH_RPC_NATIVE = ("torch._C._distributed_rpc", "torch._C._distributed_autograd")
SHIM = "compat"


@dataclass(frozen=True)
class Breach:
    line: int
    why: str


def breaches(source: str, module: str, *, is_package: bool = False) -> list[Breach]:
    """Return the breaches of rules 1 and 2 in one Python file.

    `module` is its dotted name, inside the package or not.
    """
    found = []
    part = part_of(module)
    for line, name in imports(ast.parse(source), module if is_package else module.rpartition(".")[0]):
        if part != SHIM and any(within(name, bad) for bad in (*TORCH_RPC, *TORCH_RPC_NATIVE)):
            found.append(Breach(line, f"{module} names {name}; only telegrad.{SHIM} may"))
        if part is not None and part not in NATIVE and within(name, f"{ROOT}._core"):
            found.append(Breach(line, f"{module} must not import {ROOT}._core"))
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def part_of(module: str) -> str | None:
    """Return the part of a module: its first name below `telegrad`, or None."""
    root, _, rest = module.partition(".")
    return rest.partition(".")[0] if root == ROOT else None


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of all imports, and of attributes of imported names."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name
                    bound[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            case ast.ImportFrom(module=module, names=names, level=level):
                base = absolute("." * level + (module or ""), package)
                for alias in names:
                    # `from telegrad import rpc` imports a module; `from telegrad.types import X` may or may not.
                    yield node.lineno, f"{base}.{alias.name}" if alias.name != "*" else base
                    bound[alias.asname or alias.name] = f"{base}.{alias.name}"
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")):
                if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                    yield node.lineno, absolute(node.args[0].value, package)
    for node in ast.walk(tree):
        # torch.distributed.rpc.x after `import torch`. Telegrad's own modules must be imported anyway.
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            head, _, rest = name.partition(".")
            if within(bound.get(head, ""), "torch") and f"{bound[head]}.{rest}" in (*TORCH_RPC, *TORCH_RPC_NATIVE):
                yield node.lineno, f"{bound[head]}.{rest}"


def absolute(name: str, package: str) -> str:
    """Return the absolute name of an import.

    For example, '..wire' in package 'telegrad.worker' is 'telegrad.wire'.
    """
    level = len(name) - len(name.lstrip("."))
    if level == 0:
        return name
    above = package.split(".")[: len(package.split(".")) - (level - 1)]
    return ".".join([*above, *filter(None, [name[level:]])])


def dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            head = dotted(value)
            return f"{head}.{attr}" if head else ""
    return ""


# Folders of csrc, and those whose headers a folder may include besides its own.
LAYERS = {
    "base": set[str](),
    "wire": set[str](),
    "memory": {"base"},
    "core": {"wire", "base", "memory"},
    "transports": {"base", "memory", "core"},
    "codec": set[str](),
    "python": {"base", "wire", "memory", "core", "codec"},
    "tests": {"base", "memory", "core", "transports"},
    "fuzz": {"base", "memory", "core", "transports", "codec", "python"},
}
WITH_PYTHON = {"codec", "python", "fuzz"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
FOREIGN = re.compile(r"^(torch|ATen|c10|caffe2|cuda|cuda_runtime)\b")
PYTHON = re.compile(r"^(Python\.h|nanobind/|pybind11/)")


def core_breaches(source: str, folder: str) -> list[Breach]:
    """Return the breaches of rule 3 in one C++ file of csrc/<folder>."""
    found = []
    for number, line in enumerate(source.splitlines(), 1):
        if not (include := INCLUDE.match(line)):
            continue
        name = include.group(1)
        if FOREIGN.match(name):
            found.append(Breach(number, f"the core must not know {name}"))
        if folder not in WITH_PYTHON and PYTHON.match(name):
            found.append(Breach(number, f"csrc/{folder} knows no Python, it must not include {name}"))
        target = re.sub(r"^(\.\./)+", "", name).partition("/")[0]
        if folder in LAYERS and target in LAYERS and target != folder and target not in LAYERS[folder]:
            found.append(Breach(number, f"csrc/{folder} must not include {name}"))
    return found
