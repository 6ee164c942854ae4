"""The rules of import_law.py hold in the tree, and its checker finds breaches."""

import subprocess
import sys
from pathlib import Path

import pytest
from import_law import ROOT, breaches, core_breaches

REPO = Path(__file__).parents[2]
SRC = REPO / "src"


def name_of(path: Path) -> str:
    parts = path.relative_to(SRC if path.is_relative_to(SRC) else REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_package_keeps_the_rules() -> None:
    files = [f for folder in ("src", "examples", "tools", "docs") for f in sorted((REPO / folder).rglob("*.py"))]
    assert any(f.is_relative_to(SRC) for f in files)
    found = [
        f"{file.relative_to(REPO)}:{breach.line}: {breach.why}"
        for file in files
        for breach in breaches(file.read_text(), name_of(file), is_package=file.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_the_core_keeps_the_rules() -> None:
    files = sorted(f for f in (REPO / "csrc").rglob("*") if f.suffix in (".cc", ".h"))
    assert files
    found = [
        f"{file.relative_to(REPO)}:{breach.line}: {breach.why}"
        for file in files
        for breach in core_breaches(file.read_text(), file.relative_to(REPO / "csrc").parts[0])
    ]
    assert not found, "\n".join(found)


def test_importing_the_package_loads_none_of_its_parts() -> None:
    program = "import sys, telegrad; print(*sorted(m for m in sys.modules if m.split('.')[0] in ('telegrad', 'torch')))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(run.stdout.split()) <= {"telegrad", "telegrad.errors", "telegrad.options", "telegrad.types"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("telegrad.rpc.api", "from telegrad._core import Engine"),
        ("telegrad.rpc.api", "from .. import _core"),
        ("telegrad.worker.serving.thread_pool", "import torch.distributed.rpc"),
        ("telegrad.worker.serving.thread_pool", "import torch.distributed.rpc.api as api"),
        ("telegrad.worker.serving.thread_pool", "from torch.distributed import rpc"),
        ("telegrad.worker.serving.thread_pool", "from torch.distributed import store, autograd as dist_autograd"),
        ("telegrad.worker.serving.thread_pool", "from torch.distributed.rpc import RRef"),
        ("telegrad.worker.serving.thread_pool", "from torch._C._distributed_rpc import _DEFAULT"),
        ("telegrad.worker.serving.thread_pool", "from torch._C import _distributed_autograd"),
        (
            "telegrad.worker.serving.thread_pool",
            "from importlib import import_module\nimport_module('torch.distributed.rpc')",
        ),
        ("telegrad.worker.serving.thread_pool", "__import__('torch._C._distributed_rpc')"),
        ("telegrad.worker.serving.thread_pool", "import torch\nx = torch.distributed.rpc.RRef"),
        ("telegrad.worker.serving.thread_pool", "import torch as t\nx = t._C._distributed_rpc"),
        ("telegrad.worker.serving.thread_pool", "import torch.distributed as dist\nx = dist.autograd.context()"),
        ("examples.rl.main", "import torch.distributed.rpc as rpc"),
    ],
)
def test_a_breach_is_found(module: str, source: str) -> None:
    assert len(breaches(source, module, is_package=module == ROOT)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "telegrad.wire.tags",
            "from telegrad import __version__",
        ),
        (
            "telegrad.worker.serving.thread_pool",
            "import torch, threading\nfrom .. import _core\nfrom ..protocols import rref",
        ),
        (
            "telegrad.rpc.api",
            "import torch.distributed as dist\nstore = dist.rendezvous('env://')\nautograd = torch.autograd",
        ),
        ("telegrad.rpc.api", "from ..worker import Worker  # replaces torch.distributed.rpc"),
        (
            "telegrad.compat.rpc",
            "import torch.distributed.rpc\nfrom torch._C import _distributed_rpc\nfrom .. import rpc",
        ),
        ("examples.rl.main", "import telegrad.rpc as rpc\nfrom telegrad.cli import main"),
    ],
)
def test_allowed_imports_pass(module: str, source: str) -> None:
    assert breaches(source, module) == []


@pytest.mark.parametrize(
    ("folder", "include", "lawful"),
    [
        ("core", "<torch/extension.h>", False),
        ("python", "<ATen/ATen.h>", False),
        ("transports", "<cuda_runtime.h>", False),
        ("core", "<Python.h>", False),
        ("transports", "<nanobind/nanobind.h>", False),
        ("core", '"codec/format.h"', False),
        ("core", '"../python/messages.h"', False),
        ("core", '"transports/frames.h"', False),
        ("memory", '"core/engine.h"', False),
        ("python", '"transports/shm/ring.h"', False),
        ("python", "<nanobind/nanobind.h>", True),
        ("transports", '"core/transport.h"', True),
        ("codec", "<Python.h>", True),
        ("core", '"memory/buffer_pool.h"', True),
        ("core", "<vector>", True),
    ],
)
def test_includes_are_checked(folder: str, include: str, lawful: bool) -> None:
    assert (core_breaches(f"// a comment\n#include {include}\n", folder) == []) is lawful
