"""Checkpoints of optimizers and modules on many workers."""

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.state import by_key, check_groups
from telegrad.worker.blocking import check_blocking

__all__ = ["load_checkpoint"]


def load_checkpoint(
    state: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> None:
    """Load a checkpoint of ``torch.distributed.checkpoint`` onto workers.

    ``torch.distributed.checkpoint.load`` loads only the entries that a state has already, and an optimizer that has
    made no step has none. This function loads what the checkpoint has. Parameters may be on other workers than when the
    checkpoint was saved, and on another number of workers, as long as modules have the same names and optimizers have
    the same groups.

    Names and the states of optimizers are checked before anything is loaded. Modules and optimizers are loaded in the
    order of `state`, and then the other entries.

    Args:
        state: modules, optimizers and other entries by name, as for ``torch.distributed.checkpoint.load``; other
            entries are loaded by it. The checkpoint may have further names.
        checkpoint_id: folder or other id of the checkpoint.
        storage_reader: reader of the checkpoint; by default, one for the folder.
        process_group: processes that load at the same time; see ``torch.distributed.checkpoint.load``.
        no_dist: this process loads alone, although the program has a process group of torch. Without it, the processes
            of the group wait until all of them load.

    Raises:
        ValueError: a name is not in the checkpoint, or is not of an optimizer there; or an optimizer has other groups
            or parameters of other shapes. Modules without parameters and buffers have no entries, and need none.
        RuntimeError: the checkpoint has other entries or shapes than a module, or an owner is lost.

    Example::

        import torch.distributed.checkpoint as dcp

        module = RemoteModule("worker1/cpu", torch.nn.Linear, (20, 1))
        optimizer = DistributedOptimizer(torch.optim.Adam, module.remote_parameters())
        dcp.save({"model": module, "optimizer": optimizer, "epoch": 3}, checkpoint_id="checkpoint")

        state = {"model": module, "optimizer": optimizer, "epoch": 0}
        optim.load_checkpoint(state, checkpoint_id="checkpoint")
        print(state["epoch"])  # 3
    """
    check_blocking("load_checkpoint", "`await asyncio.to_thread(...)` for it")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    reader = storage_reader if storage_reader is not None else dcp.FileSystemReader(_required(checkpoint_id))  # type: ignore[attr-defined]
    metadata = reader.read_metadata()
    saved, paths = metadata.state_dict_metadata, metadata.planner_data
    names = {path[0] for path in paths.values()}
    if missing := [name for name in state.keys() - names if _has_entries(state[name])]:
        raise ValueError(
            f"the checkpoint has no {_listed(missing)}: it has {_listed(names)}. Save and load under the same names."
        )
    whole = {name: target for name, target in state.items() if isinstance(target, (Optimizer, nn.Module))}
    others = {name: target for name, target in state.items() if name not in whole}
    alone = {"no_dist": True} if no_dist else {}

    def load(into: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is a usual case
            dcp.load(into, storage_reader=reader, process_group=process_group, **alone)  # type: ignore[attr-defined]

    entries = {key: _empty(saved[key]) for key, path in paths.items() if path[0] in whole}
    load(entries)
    loaded = unflatten_state_dict(entries, paths)
    states = {
        name: _checked(name, target, loaded.get(name, {})) if isinstance(target, Optimizer) else loaded.get(name, {})
        for name, target in whole.items()
    }
    for name, target in whole.items():
        target.load_state_dict(states[name])
    load(others)
    state.update(others)


def _checked(name: str, optimizer: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer as it is loaded.

    Raises:
        ValueError: the optimizer cannot load it.
    """
    if "param_groups" not in found:
        raise ValueError(
            f"the checkpoint has no state of an optimizer as {name!r}: it has {_listed(map(str, found))}. Save and load"
            " under the same names."
        )
    keys = [key for group in found["param_groups"] for key in group["params"]]
    checked = {**found, "state": by_key(found.get("state", {}), keys)}  # without state there are no entries for it
    if isinstance(optimizer, DistributedOptimizer):
        optimizer._split_state(checked)
    else:
        check_groups(optimizer.param_groups, checked)
    return checked


def _required(checkpoint_id: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    if checkpoint_id is None:
        raise ValueError("load_checkpoint needs a checkpoint_id, such as a folder, or a storage_reader")
    return checkpoint_id


def _has_entries(target: Any) -> bool:
    """Return whether a checkpoint would have entries of a value.

    It has none of a module without parameters and buffers, for example.
    """
    found = target.state_dict() if hasattr(target, "state_dict") else target
    return not isinstance(found, Mapping) or any(not isinstance(v, Mapping) or _has_entries(v) for v in found.values())


def _empty(metadata: Any) -> Any:
    """Return a tensor to load into; None for other values."""
    if not hasattr(metadata, "size"):
        return None
    return torch.empty(metadata.size, dtype=metadata.properties.dtype)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
