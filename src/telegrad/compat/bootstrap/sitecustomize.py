"""Hook of every Python process that has this folder on PYTHONPATH.

See telegrad.compat.child_environment. It has no effect until torch is imported. Then Telegrad replaces torch's RPC
modules before the importing program sees them. PYTHONPATH reaches every interpreter, so this module uses only the
standard library and has no effect in an interpreter without Telegrad.
"""

import importlib.util
import os
import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_searching: "set[int]" = set()  # threads that look for torch's own spec


class _WhenTorchIsImported:
    """Finder that loads torch as usual and then installs the drop-in.

    It stays until torch has been imported: programs may look for torch without importing it, and an import may fail.
    """

    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        thread = threading.get_ident()
        if fullname != "torch" or thread in _searching:
            return None
        _searching.add(thread)
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            _searching.discard(thread)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                if cls in sys.meta_path:
                    sys.meta_path.remove(cls)
                _install()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install() -> None:
    try:
        from telegrad import compat
    except ImportError as error:
        sys.stderr.write(f"telegrad run --drop-in: {sys.executable} runs on torch's own RPC: {error}\n")
    else:
        compat.install()


def _run_the_one_that_this_one_hides() -> None:
    here = os.path.dirname(os.path.realpath(__file__))
    path = [p for p in sys.path if os.path.realpath(p or os.getcwd()) != here]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _WhenTorchIsImported)
_run_the_one_that_this_one_hides()
