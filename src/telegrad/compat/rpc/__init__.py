"""Replacement of ``torch.distributed.rpc`` in a drop-in.

The public names are the very objects of :mod:`telegrad.rpc`, and so are the submodules: a patch of
``torch.distributed.rpc.api`` is a patch of ``telegrad.rpc.api``. Added are torch's names, most of them private, that
programs and torch's own tests use.
"""

import importlib
import sys
from types import ModuleType
from typing import Any, Final, NoReturn

from telegrad import observe as _observe
from telegrad import rpc as _public
from telegrad.compat import autograd as _autograd
from telegrad.compat.rpc import _utils
from telegrad.compat.rpc import invoke as _invoke
from telegrad.errors import NotInitialized
from telegrad.rpc import *  # noqa: F403
from telegrad.rpc import agent as _agent
from telegrad.rpc import api, backend_registry, constants, functions, init_rpc, internal, options
from telegrad.rpc import map as map  # `import *` leaves it out
from telegrad.rpc import start as _start

_ADDED: Final[dict[str, tuple[ModuleType, str]]] = {
    **{
        name: (api, name)
        for name in (
            "PyRRef",
            "_all_gather",
            "_barrier",
            "_cleanup_python_rpc_handler",
            "_delete_all_user_and_unforked_owner_rrefs",
            "_destroy_rref_context",
            "_get_current_rpc_agent",
            "_init_rpc_states",
            "_is_current_rpc_agent_set",
            "_require_initialized",
            "_reset_current_rpc_agent",
            "_rref_context_get_debug_info",
            "_set_and_start_rpc_agent",
            "_set_rpc_timeout",
            "_wait_all",
            "enable_gil_profiling",
            "method_factory",
            "new_method",
        )
    },
    **{name: (_invoke, name) for name in _invoke.__all__},
    **{name: (backend_registry, name) for name in (*backend_registry.__all__, "BackendType")},
    "RpcAgent": (_agent, "Agent"),
    "TensorPipeAgent": (_agent, "Agent"),
    "_DEFAULT_INIT_METHOD": (constants, "DEFAULT_INIT_METHOD"),
    "_DEFAULT_NUM_WORKER_THREADS": (constants, "DEFAULT_NUM_WORKER_THREADS"),
    "_DEFAULT_RPC_TIMEOUT_SEC": (constants, "DEFAULT_RPC_TIMEOUT_SEC"),
    "_UNSET_RPC_TIMEOUT": (constants, "UNSET_RPC_TIMEOUT"),
    "_init_rpc_backend": (_start, "_init_rpc_backend"),
    "_server_process_global_profile": (_observe, "ServerProfile"),
    "_TensorPipeRpcBackendOptionsBase": (options, "_TensorPipeRpcBackendOptionsBase"),
    "_is_tensorpipe_available": (options, "_is_tensorpipe_available"),
    "logger": (api, "logger"),
}
"""Torch's names and their replacements, looked up at each use: some change, and programs patch them."""

_SUBMODULES: Final = ("rref_proxy", "server_process_global_profiler")
"""Submodules that torch's package loads at import, and this one at first use."""

__all__ = sorted({*_public.__all__, *(name for name in _ADDED if name[0] != "_")})  # noqa: PLE0605  # a list, in the end

globals().pop("BackendType", None)  # `import *` copied a version that may be replaced

for _module in (api, backend_registry, constants, functions, internal, options):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module


def __getattr__(name: str) -> Any:
    if name in _ADDED:
        module, theirs = _ADDED[name]
        return getattr(module, theirs)
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class RemoteProfilerManager:
    """Torch's interface to name a call in a profile."""

    @staticmethod
    def set_current_profiling_key(key: str) -> None:
        """Set the profile's name for the next profiled call of this thread."""
        _observe.name_next_call(key)


def rpc_init(name: str, *args: Any, **kwargs: Any) -> None:
    """Call ``init_rpc`` under its former name, with the same arguments."""
    init_rpc(name, *args, **kwargs)


def _get_debug_info() -> dict[str, str | int]:
    """Return all counts, under torch's names.

    Raises:
        NotInitialized: this process has not joined a group.
    """
    if not api._is_current_rpc_agent_set():
        raise NotInitialized
    agent: dict[str, str] = api._get_current_rpc_agent().get_debug_info()
    return {**api._rref_context_get_debug_info(), **agent, **_autograd._get_debug_info()}


def _enable_jit_rref_pickle() -> NoReturn:
    raise NotImplementedError("Telegrad makes no calls from inside TorchScript, so scripted modules hold no RRefs.")


_disable_jit_rref_pickle = _enable_jit_rref_pickle


def _finalize_shutdown() -> None:
    """Leave the group at once, as the last step of torch's shutdown does."""
    try:
        api._destroy_rref_context(api._ignore_rref_leak)
    finally:
        api._get_current_rpc_agent().shutdown()
        api._reset_current_rpc_agent()


_ATTACHED: Final[dict[ModuleType, tuple[Any, ...]]] = {
    api: (
        *(getattr(_invoke, name) for name in _invoke.__all__),
        *(RemoteProfilerManager, _finalize_shutdown, internal.RPCExecMode, internal._build_rpc_profiling_key),
        *(_utils._group_membership_management, _utils._update_group_membership),
    ),
    backend_registry: (_utils._group_membership_management, _utils._update_group_membership),
    internal: (api._get_current_rpc_agent,),
}
"""Objects that only programs use, attached to the modules that replace torch's."""

for _module, _attached in _ATTACHED.items():
    for _one in _attached:
        setattr(_module, _one.__name__, _one)
