"""The import law as data, and a reader of imports that judges any source text by it.

Two rules hold for Python (`breaches`), one for C++ (`core_breaches`):

1. Direction. Every part of the package (the first name below `telegrad`) may import only the parts in its row of
   `MAY_IMPORT`. Parts in `PURE` import nothing else but the standard library, without its clocks, threads and I/O.
2. Torch's own RPC. Only the compatibility shim may name `torch.distributed.rpc` and its kin. (Tests and benchmarks,
   which compare the two, are not judged.)
3. The core knows no PyTorch and no CUDA; its lower folders know no Python either.

An import counts wherever it stands: inside functions, under `TYPE_CHECKING`, in `importlib.import_module("...")`.
Only the package itself (`telegrad/__init__.py`) may name its parts under `TYPE_CHECKING`: it imports them lazily.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

ROOT = "telegrad"
BASE = {"errors", "types", "options"}
CALLS = BASE | {"wire", "protocols", "serialize", "worker"}
# What users import; each stands on the worker and on those before it.
PUBLIC = CALLS | {"rpc", "rref", "observe", "autograd", "optim", "nn"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": BASE,
    "types": BASE,
    "options": BASE,
    "wire": BASE | {"wire"},
    "protocols": {"errors", "types", "protocols"},
    "serialize": BASE | {"wire", "serialize", "_core"},
    "worker": CALLS | {"_core"},
    "observe": CALLS | {"observe"},
    "autograd": CALLS | {"observe", "autograd", "_core"},
    "rref": CALLS | {"observe", "autograd", "rref"},
    "rpc": CALLS | {"observe", "autograd", "rref", "rpc"},
    "optim": PUBLIC - {"nn"},
    "nn": PUBLIC - {"optim"},
    "testing": PUBLIC | {"testing", "_core"},
    "compat": PUBLIC | {"testing", "compat"},
    "cli": PUBLIC | {"testing", "compat", "cli"},
    "__main__": {"cli"},
    # The package itself stays light, so that a pure part can be imported without torch.
    ROOT: BASE,
}
ANYONE = {ROOT}  # `from telegrad import __version__`

PURE = {"protocols"}
IMPURE_STDLIB = {
    *("asyncio", "concurrent", "contextvars", "datetime", "multiprocessing", "os", "queue", "random", "secrets"),
    *("select", "selectors", "signal", "socket", "ssl", "subprocess", "tempfile", "threading", "time", "_thread"),
}

TORCH_RPC = ("torch.distributed.rpc", "torch.distributed.autograd")
TORCH_RPC_NATIVE = ("torch._C._distributed_rpc", "torch._C._distributed_autograd")
SHIM = "compat"


@dataclass(frozen=True)
class Breach:
    line: int
    why: str


def breaches(source: str, module: str, *, is_package: bool = False) -> list[Breach]:
    """Every breach of rules 1 and 2 in one Python file; `module` is its dotted name, inside the package or not."""
    found = []
    part = part_of(module)
    tree = ast.parse(source)
    if part == ROOT and is_package:
        tree.body = [node for node in tree.body if not for_type_checkers(node)]
    for line, name in imports(tree, module if is_package else module.rpartition(".")[0]):
        if part != SHIM and any(within(name, bad) for bad in (*TORCH_RPC, *TORCH_RPC_NATIVE)):
            found.append(Breach(line, f"{module} names {name}; only telegrad.{SHIM} may"))
        if part is None:
            continue
        target = part_of(name)
        if target is None:
            top = name.partition(".")[0]
            if part in PURE and (top not in sys.stdlib_module_names or top in IMPURE_STDLIB):
                found.append(Breach(line, f"{module} is pure, it must not import {name}"))
        elif part not in MAY_IMPORT:
            found.append(Breach(line, f"telegrad.{part} has no row in MAY_IMPORT"))
        elif target not in MAY_IMPORT[part] | ANYONE:
            found.append(Breach(line, f"{module} must not import telegrad.{target}"))
    return found


def for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def part_of(module: str) -> str | None:
    """The part of the package that a module belongs to; None for modules of others."""
    names = module.split(".")
    if names[0] != ROOT:
        return None
    if len(names) == 1:
        return ROOT
    return names[1] if names[1] in MAY_IMPORT or names[1] == "_core" or names[1][0].islower() else ROOT


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a file imports, or reaches through a name that it imported."""
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
        # torch.distributed.rpc.x after `import torch`. Only torch's names are followed: ours must be imported anyway.
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            head, _, rest = name.partition(".")
            if within(bound.get(head, ""), "torch") and f"{bound[head]}.{rest}" in (*TORCH_RPC, *TORCH_RPC_NATIVE):
                yield node.lineno, f"{bound[head]}.{rest}"


def absolute(name: str, package: str) -> str:
    """A possibly relative name ('..wire', seen from package 'telegrad.worker') as a dotted name ('telegrad.wire')."""
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


PYTHON_FREE = ("core", "transports", "tests")  # folders of csrc
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
FOREIGN = re.compile(r"^(torch|ATen|c10|caffe2|cuda|cuda_runtime)\b")
PYTHON = re.compile(r"^(Python\.h|nanobind/|pybind11/)")
UPWARD = re.compile(r"^(\.\./)*(bind|codec)/")


def core_breaches(source: str, folder: str) -> list[Breach]:
    """Every breach of rule 3 in one C++ file of csrc/<folder>."""
    found = []
    for number, line in enumerate(source.splitlines(), 1):
        if not (include := INCLUDE.match(line)):
            continue
        name = include.group(1)
        if FOREIGN.match(name):
            found.append(Breach(number, f"the core must not know {name}"))
        if folder in PYTHON_FREE and (PYTHON.match(name) or UPWARD.match(name)):
            found.append(Breach(number, f"csrc/{folder} knows no Python, it must not include {name}"))
    return found
