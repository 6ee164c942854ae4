"""The import law holds in the tree (import_law.py says what it is), and its checker sees what it should."""

from pathlib import Path

import pytest
from import_law import MAY_IMPORT, ROOT, breaches, core_breaches

REPO = Path(__file__).parents[2]
SRC = REPO / "src"


def name_of(path: Path) -> str:
    parts = path.relative_to(SRC if path.is_relative_to(SRC) else REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_tree_keeps_the_law() -> None:
    files = [f for folder in ("src", "examples", "tools", "docs") for f in sorted((REPO / folder).rglob("*.py"))]
    assert any(f.is_relative_to(SRC) for f in files)
    found = [
        f"{file.relative_to(REPO)}:{breach.line}: {breach.why}"
        for file in files
        for breach in breaches(file.read_text(), name_of(file), is_package=file.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_the_core_keeps_the_law() -> None:
    files = sorted(f for f in (REPO / "csrc").rglob("*") if f.suffix in (".cc", ".h"))
    assert files
    found = [
        f"{file.relative_to(REPO)}:{breach.line}: {breach.why}"
        for file in files
        for breach in core_breaches(file.read_text(), file.relative_to(REPO / "csrc").parts[0])
    ]
    assert not found, "\n".join(found)


def test_every_part_has_a_row() -> None:
    parts = {p.stem for p in (SRC / ROOT).iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert parts - {"__init__"} <= MAY_IMPORT.keys()


def test_the_law_has_no_cycle() -> None:
    """Each part can be peeled off once everything it may import is gone; the base tables count as one part."""
    base = {"errors", "types", "options"}
    left = {part: row - {part} - (base if part in base else set()) for part, row in MAY_IMPORT.items()}
    while free := {part for part, row in left.items() if not row & left.keys()}:
        left = {part: row for part, row in left.items() if part not in free}
    assert not left


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("telegrad.errors", "from telegrad import rpc"),
        ("telegrad.errors", "from .wire import Tag"),
        ("telegrad.wire.tags", "from ..worker import Worker"),
        ("telegrad.wire.tags", "import telegrad.protocols.rref"),
        ("telegrad.rpc.api", "from telegrad._core import Engine"),
        ("telegrad.rpc.api", "from .. import _core"),
        ("telegrad.rpc.api", "from ..compat import install"),
        ("telegrad.worker.pool", "def f():\n    from telegrad.rpc import api"),
        ("telegrad.worker.pool", "if TYPE_CHECKING:\n    from ..rpc.api import rpc_sync"),
        ("telegrad.worker.pool", "import importlib\nimportlib.import_module('telegrad.rpc')"),
        ("telegrad.worker.pool", "import importlib\nimportlib.import_module('..rpc', __package__)"),
        ("telegrad.protocols.rref", "import torch"),
        ("telegrad.protocols.rref", "import time"),
        ("telegrad.protocols.rref", "from threading import Lock"),
        ("telegrad.protocols.rref", "from telegrad.options import Options"),
        ("telegrad.testing.cluster", "from telegrad.compat import install"),
        ("telegrad.unheard_of", "from telegrad.errors import RpcError"),
        ("telegrad", "from .rpc import rpc_sync"),
        ("telegrad", "def __getattr__(name):\n    from telegrad import rpc\n    return rpc"),
        ("telegrad.worker.pool", "import torch.distributed.rpc"),
        ("telegrad.worker.pool", "import torch.distributed.rpc.api as api"),
        ("telegrad.worker.pool", "from torch.distributed import rpc"),
        ("telegrad.worker.pool", "from torch.distributed import store, autograd as dist_autograd"),
        ("telegrad.worker.pool", "from torch.distributed.rpc import RRef"),
        ("telegrad.worker.pool", "from torch._C._distributed_rpc import _DEFAULT"),
        ("telegrad.worker.pool", "from torch._C import _distributed_autograd"),
        ("telegrad.worker.pool", "from importlib import import_module\nimport_module('torch.distributed.rpc')"),
        ("telegrad.worker.pool", "__import__('torch._C._distributed_rpc')"),
        ("telegrad.worker.pool", "import torch\nx = torch.distributed.rpc.RRef"),
        ("telegrad.worker.pool", "import torch as t\nx = t._C._distributed_rpc"),
        ("telegrad.worker.pool", "import torch.distributed as dist\nx = dist.autograd.context()"),
        ("examples.rl.main", "import torch.distributed.rpc as rpc"),
    ],
)
def test_a_breach_is_seen(module: str, source: str) -> None:
    assert len(breaches(source, module, is_package=module == ROOT)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("telegrad.wire.tags", "from telegrad.errors import RpcError\nfrom . import limits"),
        (
            "telegrad.wire.tags",
            "from telegrad import __version__",
        ),
        ("telegrad.protocols.rref", "import enum\nfrom dataclasses import dataclass\nfrom ..types import WorkerId"),
        ("telegrad.worker.pool", "import torch, threading\nfrom .. import _core\nfrom ..protocols import rref"),
        (
            "telegrad.rpc.api",
            "import torch.distributed as dist\nstore = dist.rendezvous('env://')\nautograd = torch.autograd",
        ),
        ("telegrad.rpc.api", "from ..worker import Worker  # stands in for torch.distributed.rpc"),
        (
            "telegrad.compat.rpc",
            "import torch.distributed.rpc\nfrom torch._C import _distributed_rpc\nfrom .. import rpc",
        ),
        ("examples.rl.main", "import telegrad.rpc as rpc\nfrom telegrad.cli import main"),
    ],
)
def test_what_is_lawful_passes(module: str, source: str) -> None:
    assert breaches(source, module) == []


def test_the_package_names_its_parts_for_type_checkers_only() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from telegrad import rpc"
    assert breaches(source, ROOT, is_package=True) == []
    assert len(breaches(source, "telegrad.worker.pool")) == 1


def test_a_package_is_its_own_parent() -> None:
    assert breaches("from .api import rpc_sync", "telegrad.rpc", is_package=True) == []
    assert len(breaches("from .api import rpc_sync", "telegrad.rpc")) == 1


@pytest.mark.parametrize(
    ("folder", "include", "lawful"),
    [
        ("core", "<torch/extension.h>", False),
        ("bind", "<ATen/ATen.h>", False),
        ("transports", "<cuda_runtime.h>", False),
        ("core", "<Python.h>", False),
        ("transports", "<nanobind/nanobind.h>", False),
        ("core", '"codec/format.h"', False),
        ("core", '"../bind/module.h"', False),
        ("bind", "<nanobind/nanobind.h>", True),
        ("codec", "<Python.h>", True),
        ("core", '"core/pool.h"', True),
        ("core", "<vector>", True),
    ],
)
def test_includes_are_judged(folder: str, include: str, lawful: bool) -> None:
    assert (core_breaches(f"// a comment\n#include {include}\n", folder) == []) is lawful
