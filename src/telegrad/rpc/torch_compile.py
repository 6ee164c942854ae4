"""Keeps `torch.compile` out of Telegrad's code: a remote call is a graph break.

Dynamo traces into all packages that are not on its skip list, and would compile a call's frames instead of running
them. Torch's own RPC package is on the list. Dynamo takes longer to import than Telegrad, and most programs never use
it. So unless it is loaded, a finder of the import system waits for the module that has the list.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Final

__all__ = ["skip_telegrad"]

_RULES: Final = "torch._dynamo.trace_rules"


class _RulesFinder(MetaPathFinder):
    """Finds Dynamo's list of rules, and nothing else."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the module's spec with a loader that adds Telegrad to the list."""
        if name != _RULES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _RulesLoader(spec.loader.name, spec.loader.path)
        return spec


class _RulesLoader(SourceFileLoader):
    """Loads Dynamo's list of rules, and adds Telegrad to it."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module."""
        super().exec_module(module)
        if _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
        _add_to(module)


_finder: Final = _RulesFinder()


def skip_telegrad() -> None:
    """Add Telegrad to Dynamo's skip list, now or when Dynamo is imported."""
    if _RULES in sys.modules:
        _add_to(importlib.import_module(_RULES))  # waits for a thread that is importing it
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _add_to(rules: ModuleType) -> None:
    add = getattr(rules, "add", None)  # no public API
    if add is not None:
        add("telegrad")
