"""Torch's names are redirected however they are reached, and restored."""

import builtins
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.nn
import torch.distributed.optim
import torch.distributed.rpc as torch_rpc

import telegrad.compat.futures
import telegrad.compat.rpc
import telegrad.nn
import telegrad.optim.local
import telegrad.rpc
from telegrad import compat
from telegrad.compat.redirect import MODULES
from telegrad.options import Options, as_options
from telegrad.testing import cluster

CHANGED = (
    *(torch._C, torch.distributed, torch.distributed.optim, torch.distributed.nn, torch.nn.parallel.distributed),
    torch.futures,
)
SUBMODULES = ("api", "backend_registry", "constants", "functions", "internal", "options")


@pytest.fixture
def installed() -> Iterator[None]:
    compat.install()
    try:
        yield
    finally:
        compat.uninstall()


def snapshot() -> dict[str, Any]:
    """Return everything that installing changes."""
    names = {name: module for name, module in sys.modules.items() if name.startswith("torch.")}
    attributes = {f"{module.__name__}.{name}": getattr(module, name) for module in CHANGED for name in vars(module)}
    return {**names, **attributes}


@pytest.mark.usefixtures("installed")
def test_every_import_of_the_module_is_redirected() -> None:
    import torch.distributed.rpc
    import torch.distributed.rpc as renamed
    from torch.distributed import rpc

    ours = telegrad.compat.rpc
    assert torch.distributed.rpc is renamed is rpc is ours  # type: ignore[comparison-overlap]
    assert sys.modules["torch.distributed.rpc"] is importlib.import_module("torch.distributed.rpc") is ours


@pytest.mark.usefixtures("installed")
def test_modules_loaded_by_torchs_package_exist() -> None:
    for leaf in ("rref_proxy", "server_process_global_profiler", "_utils"):
        module = getattr(torch.distributed.rpc, leaf)
        assert module is importlib.import_module(f"torch.distributed.rpc.{leaf}")
        assert module.__name__ == f"telegrad.compat.rpc.{leaf}"
    profiler = torch.distributed.rpc.server_process_global_profiler._server_process_global_profile
    assert profiler is torch.distributed.rpc._server_process_global_profile
    with pytest.raises(NotImplementedError, match="manage their group"):
        torch.distributed.rpc._utils._update_group_membership(None, [], {}, True)
    with pytest.raises(NotImplementedError, match="join and leave without a lock"):
        torch.distributed.rpc._utils._group_membership_management(None, "a", True)


@pytest.mark.usefixtures("installed")
def test_proxies_like_torchs() -> None:
    from torch.distributed.rpc.rref_proxy import RRefProxy, _invoke_rpc

    with cluster(2) as w:
        rref = w[0].remote("w1", complex, (3, 4))
        assert isinstance(rref.rpc_sync(), RRefProxy)
        assert RRefProxy(rref, torch_rpc.rpc_sync).conjugate() == 3 - 4j
        assert RRefProxy(rref, torch_rpc.rpc_async, 10).conjugate().wait() == 3 - 4j
        assert _invoke_rpc(rref, torch_rpc.remote, "conjugate", -1.0).to_here() == 3 - 4j
        del rref


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("leaf", SUBMODULES)
def test_submodules_are_identical(leaf: str) -> None:
    module = importlib.import_module(f"torch.distributed.rpc.{leaf}")
    assert module is importlib.import_module(f"telegrad.rpc.{leaf}")
    assert module is importlib.import_module(f"telegrad.compat.rpc.{leaf}")
    assert module is getattr(torch.distributed.rpc, leaf)


@pytest.mark.usefixtures("installed")
def test_names_can_be_imported() -> None:
    from torch.distributed.rpc import RRef, WorkerInfo, init_rpc
    from torch.distributed.rpc.api import _all_gather
    from torch.distributed.rpc.functions import async_execution

    assert RRef is telegrad.rpc.RRef  # type: ignore[comparison-overlap]
    assert WorkerInfo is telegrad.rpc.WorkerInfo  # type: ignore[comparison-overlap]
    assert init_rpc is telegrad.rpc.init_rpc
    assert _all_gather is telegrad.rpc.api._all_gather
    assert async_execution is telegrad.rpc.functions.async_execution


@pytest.mark.usefixtures("installed")
def test_every_import_of_torchs_core_modules_is_redirected(tmp_path: Path) -> None:
    import torch._C._distributed_rpc as renamed
    from torch._C import _distributed_autograd, _distributed_rpc
    from torch._C._distributed_autograd import _current_context
    from torch._C._distributed_rpc import PyRRef, _is_current_rpc_agent_set

    assert _distributed_rpc is renamed is torch._C._distributed_rpc is telegrad.compat.rpc  # type: ignore[comparison-overlap]
    assert _distributed_autograd is torch._C._distributed_autograd is telegrad.compat.autograd  # type: ignore[comparison-overlap]
    assert importlib.import_module("torch._C._distributed_rpc") is telegrad.compat.rpc
    assert _current_context is telegrad.compat.autograd._current_context
    options = telegrad.rpc.Options(init_method=f"file://{tmp_path}/store")
    torch.distributed.rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        assert _is_current_rpc_agent_set()
        assert isinstance(torch.distributed.rpc.RRef(1), PyRRef)
    finally:
        torch.distributed.rpc.shutdown()
    assert not _is_current_rpc_agent_set()
    assert torch._C._distributed_c10d.Store is torch.distributed.Store  # not ours to replace


@pytest.mark.usefixtures("installed")
def test_missing_names_raise() -> None:
    with pytest.raises(
        ModuleNotFoundError, match=r"torch\.distributed\.rpc\.nothing is not part of Telegrad's drop-in"
    ):
        importlib.import_module("torch.distributed.rpc.nothing")


@pytest.mark.usefixtures("installed")
def test_optimizer_and_remote_module_are_ours_and_the_rest_of_their_packages_is_torchs() -> None:
    from torch.distributed.nn.api.remote_module import RemoteModule, _RemoteModule
    from torch.distributed.optim import DistributedOptimizer, ZeroRedundancyOptimizer
    from torch.distributed.optim.optimizer import _LocalOptimizer

    assert DistributedOptimizer is telegrad.optim.DistributedOptimizer  # type: ignore[comparison-overlap]
    assert issubclass(_LocalOptimizer, telegrad.optim.local.LocalOptimizer)
    assert issubclass(RemoteModule, telegrad.nn.RemoteModule)
    assert issubclass(RemoteModule, _RemoteModule)
    assert torch.distributed.nn.RemoteModule is RemoteModule
    assert torch.distributed.nn.functional.all_reduce is not None
    assert telegrad.optim.ZeroRedundancyOptimizer is ZeroRedundancyOptimizer


def test_everything_is_restored() -> None:
    before = snapshot()
    compat.install()
    assert compat.installed()
    assert snapshot() != before
    compat.install()  # once more changes nothing
    importlib.import_module("torch.distributed.rpc.api")
    compat.uninstall()
    assert not compat.installed()
    assert snapshot() == before
    assert torch.distributed.rpc is torch_rpc
    assert importlib.import_module("torch.distributed.rpc.api") is torch_rpc.api
    compat.uninstall()


@pytest.mark.parametrize("name", ["collect_all", "wait_all"])
def test_functions_of_futures_are_replaced_only_while_installed(name: str) -> None:
    """An import of the replacements alone changes nothing."""
    assert getattr(torch.futures, name).__module__ == "torch.futures"
    for _ in range(2):
        compat.install()
        assert getattr(torch.futures, name) is getattr(telegrad.compat.futures, name)
        compat.uninstall()
        assert getattr(torch.futures, name).__module__ == "torch.futures"


def test_torch_waits_for_its_own_futures() -> None:
    parent: torch.futures.Future[int] = torch.futures.Future()
    parent.set_result(1)
    compat.install()
    try:
        assert torch.futures.wait_all([parent]) == [1]  # by torch's own
    finally:
        compat.uninstall()


def test_raises_while_torchs_own_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_rpc, "_is_current_rpc_agent_set", lambda: True)
    with pytest.raises(RuntimeError, match="is running in this process"):
        compat.install()
    assert not compat.installed()


def test_public_names_are_identical_objects() -> None:
    assert set(telegrad.rpc.__all__) <= set(telegrad.compat.rpc.__all__)
    for name in telegrad.rpc.__all__:
        assert getattr(telegrad.compat.rpc, name) is getattr(telegrad.rpc, name), name


def test_public_names_are_all_of_torchs() -> None:
    assert set(torch_rpc.__all__) - set(telegrad.compat.rpc.__all__) == set()


PRIVATE = (
    "_UNSET_RPC_TIMEOUT",
    "_all_gather",
    "_barrier",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_disable_jit_rref_pickle",
    "_enable_jit_rref_pickle",
    "_get_current_rpc_agent",
    "_get_debug_info",
    "_init_rpc_backend",
    "_is_current_rpc_agent_set",
    "_is_tensorpipe_available",
    "_require_initialized",
    "_rref_context_get_debug_info",
    "_server_process_global_profile",
    "_set_rpc_timeout",
    "enable_gil_profiling",
    "get_rpc_timeout",
    "PyRRef",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "WorkerInfo",
)


@pytest.mark.parametrize("name", PRIVATE)
def test_private_names_that_programs_use_exist(name: str) -> None:
    assert hasattr(telegrad.compat.rpc, name) or hasattr(telegrad.compat.rpc.api, name)


def test_table_names_modules_that_torch_has() -> None:
    for name in MODULES:
        assert isinstance(importlib.import_module(name), ModuleType)


def test_a_star_import_hides_no_builtin() -> None:
    for package in (telegrad.rpc, telegrad.compat.rpc):
        assert not set(dir(builtins)) & set(package.__all__)
        assert package.map is telegrad.rpc.map


@pytest.mark.usefixtures("installed")
def test_default_of_inherit_from_caller_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Options().inherit_from_caller
    assert not as_options(torch.distributed.rpc.TensorPipeRpcBackendOptions()).inherit_from_caller
    assert Options(inherit_from_caller=True).inherit_from_caller
    monkeypatch.setenv("TELEGRAD_INHERIT_FROM_CALLER", "1")
    assert as_options(None).inherit_from_caller
    compat.uninstall()
    monkeypatch.delenv("TELEGRAD_INHERIT_FROM_CALLER")
    assert Options().inherit_from_caller
