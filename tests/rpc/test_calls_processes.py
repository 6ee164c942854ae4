"""Calls between processes with different definitions."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.testing import processes


def echo(x: Any) -> Any:
    return x


def join(rank: int, n: int, init_method: str) -> None:
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=rpc.Options(init_method=init_method))


def error_of(function: Any, *args: Any) -> str:
    try:
        rpc.rpc_sync("w1", function, args)
    except RuntimeError as e:
        return f"{[kind.__name__ for kind in type(e).__mro__]} {e}"
    return "no error"


def different_definitions(rank: int, n: int, init_method: str) -> Any:
    torch.set_num_threads(1)
    module = sys.modules["only_here"] = types.ModuleType("only_here")
    here = sys.modules[__name__]
    if rank == 0:
        code = (
            "def function(x): return x\n"
            "class Class:\n"
            "    def method(self): return 1\n"
            "    @classmethod\n"
            "    def made(cls): return cls()\n"
        )
        exec(compile(code, "only_here.py", "exec"), module.__dict__)
        exec(compile("def only_in_this(x): return x", __file__, "exec"), here.__dict__)
    join(rank, n, init_method)
    errors = []
    if rank == 0:
        errors = [
            error_of(module.function, 1),
            error_of(module.Class),
            error_of(module.Class.made),
            error_of(echo, module.Class()),
            error_of(module.Class().method),
            error_of(here.only_in_this, 1),
        ]
        assert rpc.rpc_sync("w1", echo, (1,)) == 1
        assert rpc.rpc_sync("w1", lambda x: x + 1, (1,)) == 2
    rpc.shutdown()
    return errors


def test_definitions_that_the_callee_lacks() -> None:
    errors, _ = processes(2, different_definitions, method="fork")
    names = ["function", "Class", "Class", "Class", "Class", "only_in_this"]
    for name, error in zip(names, errors, strict=True):
        assert name in error
        assert "AttributeError" in error
        assert "Default RPC pickler does not serialize" in error


CALLER = """
import subprocess
import sys
from telegrad import rpc
rpc.init_rpc("w0", rank=0, world_size=2, rpc_backend_options=rpc.Options(init_method=sys.argv[1]))
try:
    rpc.rpc_sync("w1", eval, ("__import__('__main__').fail()",))
except ValueError as e:
    print(type(e).__mro__[1].__name__, e, e.code)
rpc.shutdown()
"""

CALLEE = """
import subprocess
import sys
from telegrad import rpc
class OnlyThere(ValueError):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")
        self.code = code
def fail():
    raise OnlyThere(3, "why")
rpc.init_rpc("w1", rank=1, world_size=2, rpc_backend_options=rpc.Options(init_method=sys.argv[1]))
rpc.shutdown()
"""


def test_exception_of_another_script_keeps_its_type(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/meeting"
    caller, callee = (
        subprocess.Popen([sys.executable, "-c", program, meeting], stdout=subprocess.PIPE, text=True)
        for program in (CALLER, CALLEE)
    )
    assert caller.communicate(timeout=50)[0] == "OnlyThere 3: why 3\n"
    callee.communicate(timeout=50)
    assert (caller.returncode, callee.returncode) == (0, 0)


def module_missing(rank: int, n: int, init_method: str) -> str:
    torch.set_num_threads(1)
    if rank == 0:
        module = sys.modules["only_here"] = types.ModuleType("only_here")
        exec(compile("def function(x): return x", "only_here.py", "exec"), module.__dict__)
    join(rank, n, init_method)
    error = ""
    if rank == 0:
        error = error_of(sys.modules["only_here"].function, 1)
    rpc.shutdown()
    return error


def test_a_module_the_other_process_cannot_import() -> None:
    error, _ = processes(2, module_missing, method="fork")
    assert "ModuleNotFoundError" in error
    assert "No module named 'only_here'" in error
    assert "Default RPC pickler does not serialize" in error


def exit_in_handler(rank: int, n: int, init_method: str) -> list[str]:
    torch.set_num_threads(1)
    join(rank, n, init_method)
    errors = []
    if rank == 0:
        errors = [error_of(sys.exit, 3), error_of(raise_keyboard_interrupt)]
        for _ in range(20):
            errors.append(error_of(sys.exit, 3))
        assert rpc.rpc_sync("w1", echo, (1,)) == 1
    rpc.shutdown()
    return errors


def raise_keyboard_interrupt() -> None:
    raise KeyboardInterrupt("from a handler")


def test_exits_in_handlers_end_neither_process_nor_thread() -> None:
    errors, _ = processes(2, exit_in_handler, method="fork", timeout=30)
    assert "SystemExit" in errors[0]
    assert "KeyboardInterrupt" in errors[1]
    assert "from a handler" in errors[1]
    assert len(errors) == 22


@pytest.mark.slow
def test_spawned_processes_call_each_other() -> None:
    assert processes(3, call_all, method="spawn") == [[0, 1, 2]] * 3


def call_all(rank: int, n: int, init_method: str) -> list[int]:
    join(rank, n, init_method)
    got = [rpc.rpc_sync(f"w{to}", echo, (to,)) for to in range(n)]
    rpc.shutdown()
    return got


def use_in_a_fork(rank: int, n: int, init_method: str) -> list[str]:
    join(rank, n, init_method)
    rref = rpc.remote("w0", echo, (1,))
    rref.to_here()
    reader, writer = os.pipe()
    if os.fork() == 0:
        texts = []
        for use in (lambda: rpc.rpc_sync("w0", echo, (1,)), rref.to_here):
            try:
                use()
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
        os.write(writer, json.dumps([*texts, joined_again(init_method)]).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        texts = json.loads(pipe.read())
    rpc.shutdown()
    return [*texts, f"worker w0 (pid {os.getpid()})"]


def joined_again(init_method: str) -> str:
    """Join and leave a group of one's own, and return the text of a later error."""
    rpc.init_rpc("alone", rpc_backend_options=rpc.Options(init_method=f"{init_method}-of-the-fork"))
    assert rpc.rpc_sync("alone", echo, (1,)) == 1
    rpc.shutdown()
    return error_of(echo, 1)


def test_errors_in_a_fork_name_the_parent() -> None:
    ((call, reference, later, parent),) = processes(1, use_in_a_fork, method="fork")
    for text, kind in ((call, "NotInitialized"), (reference, "RRefDeleted")):
        assert text.startswith(kind)
        assert f"was forked from that of {parent}, and a fork has no worker" in text
    assert "was forked" not in later
    assert "has not been initialized" in later
