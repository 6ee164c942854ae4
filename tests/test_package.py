"""``import telegrad`` is cheap, and its modules are imported when first used."""

import subprocess
import sys

import pytest

import telegrad

PROGRAM = """
import sys
import telegrad

assert "torch" not in sys.modules
assert [m for m in sys.modules if m.startswith("telegrad")] == ["telegrad"]
assert set(telegrad.__all__) <= set(dir(telegrad))
assert [m for m in sys.modules if m.startswith("telegrad")] == ["telegrad"]  # dir() imports nothing

from telegrad import errors
assert errors is telegrad.errors is sys.modules["telegrad.errors"]
assert "torch" not in sys.modules

assert callable(telegrad.rpc.rpc_sync)  # no import of telegrad.rpc came before
assert telegrad.rpc is sys.modules["telegrad.rpc"]
from telegrad import *
for name in telegrad.__all__[1:]:
    assert globals()[name] is getattr(telegrad, name) is sys.modules[f"telegrad.{name}"], name
"""


def test_modules_resolve_lazily() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_other_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'telegrad' has no attribute 'no_such_module'"):
        telegrad.no_such_module  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(telegrad, "_core_of_something_else")
