"""Redirect of imports from one module to another.

It covers ``sys.modules``, the attribute of the parent module, and all submodules.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Final

__all__ = ["MODULES", "NAMES", "Redirect"]

MODULES: Final = {
    "torch.distributed.rpc": "telegrad.compat.rpc",
    "torch.distributed.autograd": "telegrad.compat.autograd",
    "torch.distributed.optim.optimizer": "telegrad.compat.optim",
    "torch.distributed.nn.api.remote_module": "telegrad.compat.nn",
    "torch._C._distributed_rpc": "telegrad.compat.rpc",
    "torch._C._distributed_autograd": "telegrad.compat.autograd",
}
"""Torch's modules and their replacements. Submodules resolve to submodules of the replacement."""

NAMES: Final = {
    ("torch.distributed.optim", "DistributedOptimizer"): "telegrad.compat.optim",
    ("torch.distributed.nn", "RemoteModule"): "telegrad.compat.nn",
    ("torch.nn.parallel.distributed", "RRef"): "telegrad.compat.rpc",
    ("torch.futures", "collect_all"): "telegrad.compat.futures",
    ("torch.futures", "wait_all"): "telegrad.compat.futures",
}
"""Names of other modules of torch, most of them copied from those at import, and the modules that replace them."""

_AT_ONCE: Final = ("torch.distributed.rpc", "torch._C._distributed_rpc", "torch._C._distributed_autograd")
"""Modules to replace even if torch has not loaded them: the import system looks up nothing below ``torch._C``."""

_ABSENT: Final = object()


class Redirect(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Redirect of one process; :meth:`stop` undoes :meth:`start`."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}  # replaced entries of sys.modules
        self._attributes: list[tuple[ModuleType, str, object]] = []  # replaced attributes: module, name, value

    def start(self) -> None:
        """Replace torch's modules.

        All replacements are imported first, so a failure changes nothing.
        """
        ours = {
            name: importlib.import_module(target)
            for name, target in MODULES.items()
            if name in sys.modules or name in _AT_ONCE
        }
        named = {
            (module_name, name): getattr(importlib.import_module(target), name)
            for (module_name, name), target in NAMES.items()
            if module_name in sys.modules
        }
        self._modules = {name: module for name, module in sys.modules.items() if _root_of(name)}
        for name in self._modules:
            del sys.modules[name]
        for name, module in ours.items():
            parent, _, leaf = name.rpartition(".")
            sys.modules[name] = module
            self._set(sys.modules[parent], leaf, module)
        for (module_name, name), value in named.items():
            self._set(sys.modules[module_name], name, value)
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Restore torch's modules."""
        sys.meta_path.remove(self)
        for name in [name for name in sys.modules if _root_of(name)]:
            del sys.modules[name]
        sys.modules.update(self._modules)
        for module, name, value in reversed(self._attributes):
            if value is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, value)

    def _set(self, module: ModuleType, name: str, value: object) -> None:
        self._attributes.append((module, name, getattr(module, name, _ABSENT)))
        setattr(module, name, value)

    # ---- called by the import system for modules that are not in sys.modules yet ----

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        real = _real_name(fullname)
        if real is None:
            return None
        try:
            if importlib.util.find_spec(real) is not None:
                return importlib.machinery.ModuleSpec(fullname, self)
        except ModuleNotFoundError:
            pass
        raise ModuleNotFoundError(
            f"{fullname} is not part of Telegrad's drop-in (it would be {real}). Please report what needs it.",
            name=fullname,
        )

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns the entry of sys.modules afterwards, so its empty module is discarded.
        name = module.__name__
        sys.modules[name] = importlib.import_module(str(_real_name(name)))


def _root_of(name: str) -> str | None:
    return next((root for root in MODULES if name == root or name.startswith(root + ".")), None)


def _real_name(name: str) -> str | None:
    root = _root_of(name)
    return None if root is None else MODULES[root] + name[len(root) :]
