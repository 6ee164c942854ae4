"""Modules of examples, which have no package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def import_module(name: str, path: Path) -> ModuleType:
    """Import a module of an example under a name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
