"""Every name of torch's modules exists in Telegrad, or is left out for a reason."""

import ast
import importlib
import inspect
import pkgutil
import sys
from datetime import timedelta
from types import ModuleType
from typing import Any, Final

import pytest

from telegrad.compat.redirect import MODULES

_TYPING = "a type variable"
_LEFTOVER = "left over from a loop at the end of torch's module"
_GATHERING = "gatherings belong to a worker here: telegrad.rpc.collectives"
_PROFILED = "calls are shown in profiles by telegrad.observe, not by their callers"
_MAPS = "device maps are checked and exchanged by telegrad.group.device_maps"
_SCRIPT = "TorchScript makes no remote calls here, so no remote module and no optimizer is scripted for them"
_SERVER = "takes the C++ state of a profiler: _server_process_global_profile is there"
_COUNTED = "groups are counted by telegrad.rpc.start"

_NODE = "profiles know workers by their names and ids, without a number of the process"

LEFT_OUT: Final[dict[str, dict[str, str]]] = {
    "torch._C._distributed_rpc": {
        "_set_profiler_node_id": _NODE,
        "_enable_server_process_global_profiler": _SERVER,
        "_disable_server_process_global_profiler": _SERVER,
    },
    "torch.distributed.rpc": {
        "_init_counter": _COUNTED,
        "_init_counter_lock": _COUNTED,
        "_validate_rpc_args": "arguments are checked by init_rpc and by what they are passed to",
        "_set_profiler_node_id": _NODE,
        "_enable_server_process_global_profiler": _SERVER,
        "_disable_server_process_global_profiler": _SERVER,
    },
    "torch.distributed.rpc.api": {
        "_P": _TYPING,
        "_R": _TYPING,
        "T": _TYPING,
        "GenericWithOneTypeVar": "RRef is generic itself",
        "method_name": _LEFTOVER,
        "method": _LEFTOVER,
        "docstring": _LEFTOVER,
        "_all_gather_dict_lock": _GATHERING,
        "_all_gather_sequence_id": _GATHERING,
        "_all_gather_sequence_id_to_states": _GATHERING,
        "_get_should_profile": _PROFILED,
        "_enable_rpc_profiler": _PROFILED,
    },
    "torch.distributed.rpc.backend_registry": {
        "_init_process_group": "no process group is made for RPC",
        "_tensorpipe_validate_devices": _MAPS,
        "_tensorpipe_exchange_and_check_all_device_maps": _MAPS,
        "_validate_device_maps": _MAPS,
        "_create_device_list": _MAPS,
        "_create_reverse_mapping": _MAPS,
        "_get_device_infos": _MAPS,
        "_set_devices_and_reverse_device_map": _MAPS,
    },
    "torch.distributed.rpc.internal": {
        "_start_record_function": "fails in torch too: it uses torch.autograd._RecordFunction, which is gone",
    },
    "torch.distributed.rpc.server_process_global_profiler": {
        "_enable_server_process_global_profiler": _SERVER,
        "_disable_server_process_global_profiler": _SERVER,
    },
    "torch.distributed.optim.optimizer": {
        "_ScriptLocalOptimizerInterface": _SCRIPT,
    },
    "torch.distributed.nn.api.remote_module": {
        "T": _TYPING,
        "_grad_t": "a type alias",
        "_instantiate_template": _SCRIPT,
        "_recursive_script_module_receiver": "scripted modules travel by telegrad.serialize",
        "_recursive_script_module_reducer": "scripted modules travel by telegrad.serialize",
    },
}
"""Names that the replacement of torch's module lacks -> reason, by module."""

_ATTRIBUTES = "generated methods need no template here"
MEMBERS_LEFT_OUT: Final[dict[str, dict[str, str]]] = {
    "TensorPipeAgent": {"_update_group_membership": "workers manage their group; its members cannot be set"},
    "FaultyTensorPipeAgent": {"_update_group_membership": "as of TensorPipeAgent"},
    "_RemoteModule": dict.fromkeys(
        ("_check_attribute_picklability", "_init_template", "_install_generated_methods", "_prepare_init"), _ATTRIBUTES
    ),
    "RemoteModule": dict.fromkeys(
        ("_check_attribute_picklability", "_init_template", "_install_generated_methods", "_prepare_init"), _ATTRIBUTES
    ),
    "_LocalOptimizer": {"global_lock": "optimizers of the same parameters take turns: telegrad.optim.parameters"},
    "_ScriptLocalOptimizer": {"compile_lock": _SCRIPT},
}
"""Members that the replacement of torch's class lacks -> reason, by class."""

_OF_THE_MACHINERY = (
    "torch.distributed.rpc",
    "torch.distributed.autograd",
    "torch._C._distributed_",
    "torch.distributed.nn",
)


def pairs() -> list[tuple[str, str]]:
    """Return torch's redirected modules and submodules, with their replacements."""
    found = []
    for theirs, ours in MODULES.items():
        found.append((theirs, ours))
        path = getattr(importlib.import_module(theirs), "__path__", ())
        below = [module.name for module in pkgutil.walk_packages(path, f"{theirs}.")]
        found += [(name, ours + name.removeprefix(theirs)) for name in below]
    return found


def names_of(module: ModuleType) -> set[str]:
    """Return a module's own names and those of torch's RPC."""
    names = {name for name in vars(module) if not (name.startswith("__") and name.endswith("__"))}
    names -= {name for name in names if isinstance(getattr(module, name), ModuleType)}
    if not str(module.__file__).endswith(".py"):  # made by C++
        return names
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and not node.level and not node.module.startswith(_OF_THE_MACHINERY):  # type: ignore[union-attr]
            names -= {alias.asname or alias.name for alias in node.names}
    return names - {"Store"}  # of torch._C._distributed_c10d


def missing(theirs: ModuleType, ours: ModuleType) -> set[str]:
    return {name for name in names_of(theirs) if not hasattr(ours, name)}


@pytest.mark.parametrize(("theirs", "ours"), pairs())
def test_every_name_exists(theirs: str, ours: str) -> None:
    assert missing(importlib.import_module(theirs), importlib.import_module(ours)) == set(LEFT_OUT.get(theirs, {}))


@pytest.mark.parametrize(("theirs", "ours"), pairs())
def test_constants_have_torchs_values(theirs: str, ours: str) -> None:
    there, here = importlib.import_module(theirs), importlib.import_module(ours)
    names = names_of(there) - missing(there, here)
    constants = {name for name in names if isinstance(getattr(there, name), (int, float, timedelta))}
    constants |= {name for name in names if "DEFAULT" in name}
    assert {name: getattr(here, name) for name in constants} == {name: getattr(there, name) for name in constants}
    assert "rpc.constants" not in theirs or "_DEFAULT_RPC_TIMEOUT_SEC" in constants


def test_every_module_with_names_left_out_is_compared() -> None:
    assert set(LEFT_OUT) <= {theirs for theirs, _ in pairs()}


def public_and_private(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("__") and not name.startswith("_pybind11")}


def members_missing(theirs: type, ours: Any) -> set[str]:
    stands = ours() if theirs.__name__.endswith("BackendOptions") else ours  # their attributes are set by __init__
    base = set(dir(importlib.import_module("torch").nn.Module)) if "Optimizer" in theirs.__name__ else set()
    return {name for name in public_and_private(theirs) - base if not hasattr(stands, name)}


def test_every_member_of_a_class_exists() -> None:
    left_out: dict[str, set[str]] = {}
    for module, replacement in pairs():
        theirs, ours = importlib.import_module(module), importlib.import_module(replacement)
        for name in names_of(theirs) - missing(theirs, ours):
            cls = getattr(theirs, name)
            if inspect.isclass(cls) and name != "_TensorPipeRpcBackendOptionsBase":  # its members are its subclass's
                left_out.setdefault(name, set()).update(members_missing(cls, getattr(ours, name)))
    assert {name: members for name, members in left_out.items() if members} == {
        name: set(members) for name, members in MEMBERS_LEFT_OUT.items()
    }


def test_every_name_left_out_has_a_reason() -> None:
    for names in (*LEFT_OUT.values(), *MEMBERS_LEFT_OUT.values()):
        assert all(reason.strip() for reason in names.values())


def test_a_missing_name_is_found() -> None:
    """The comparison itself finds a missing name."""
    theirs = importlib.import_module("torch.distributed.rpc.constants")
    ours = ModuleType("empty")
    assert {"_UNSET_RPC_TIMEOUT", "DEFAULT_SHUTDOWN_TIMEOUT"} <= missing(theirs, ours)
    assert "timedelta" not in missing(theirs, ours)
    assert "telegrad.compat.rpc.api" in sys.modules
