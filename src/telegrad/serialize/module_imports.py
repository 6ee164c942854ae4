"""Imports of modules that messages name, in several threads at once."""

import importlib
import sys
from types import ModuleType

__all__ = ["canonical", "ensure_imported", "import_parents_first"]


def canonical(name: str) -> str:
    """Return the name of a module that parent and child processes share.

    A spawned process imports the script of its parent as ``__mp_main__``. Both processes find it by both names.
    """
    return "__main__" if name == "__mp_main__" else name


def import_parents_first(name: str) -> ModuleType:
    """Import a module, its packages first, and return it.

    Python itself locks a submodule before its package. If the package imports the submodule and another thread has
    begun to import the package, each thread waits for the other's lock, and one of them gets an error. The first two
    requests to a worker may name two modules of one package.

    Raises:
        ModuleNotFoundError: The module does not exist in this process. Importing it may raise other errors.
    """
    end = name.find(".")
    while end > 0:
        package = name[:end]
        if _needs_import(package):
            importlib.import_module(package)
        end = name.find(".", end + 1)
    return importlib.import_module(name)


def ensure_imported(name: str) -> None:
    """Import a module like `import_parents_first`, unless it is loaded."""
    if name not in sys.modules:
        import_parents_first(name)


def _needs_import(name: str) -> bool:
    """Return whether a module is not imported yet, or is being imported."""
    module = sys.modules.get(name)
    return module is None or getattr(getattr(module, "__spec__", None), "_initializing", False)
