"""``telegrad run``: run a program written for ``torch.distributed.rpc``."""

import argparse
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from telegrad.cli.python_line import NotPython, PythonLine, read

__all__ = ["main"]

DESCRIPTION = """\
Runs a program as `python` would, with Telegrad instead of torch.distributed.rpc (and of .autograd,
.optim.DistributedOptimizer and .nn.RemoteModule): in the program itself and in all Python processes that it starts,
spawned or forked. The program needs no changes.

The words after --drop-in are those after `python`: options of Python (-u, -W, -X, -i, ...), then a program, -m MODULE,
-c CODE, or - for standard input, then the program's arguments. A name that is not a file is a command on PATH.
"""

EPILOG = """\
examples:
  telegrad run --drop-in train.py --epochs 3
  telegrad run --drop-in -X dev -m pytest tests
  telegrad run --drop-in torchrun --nproc-per-node 4 train.py
  torchrun --nproc-per-node 4 --no-python telegrad run --drop-in train.py

If another launcher starts Python, `telegrad env` prints the environment for it.
"""


def main(words: Sequence[str]) -> int:
    """Replace this process with the program. Return an exit status only on failure.

    Args:
        words: arguments after ``telegrad run``.
    """
    from telegrad.compat import child_environment

    parser = argparse.ArgumentParser(
        prog="telegrad run",
        usage="telegrad run --drop-in [OPTION OF PYTHON ...] [PROGRAM | -m MODULE | -c CODE | -] [ARGUMENT ...]\n"
        "       telegrad run --drop-in COMMAND [ARGUMENT ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    try:
        line = read(words, ("--drop-in", "--help"))
    except NotPython as e:
        parser.error(f"{e}. Python's options and --drop-in come before the program, its own after it")
    if "--help" in line.others or {"h", "?"} & line.letters:
        parser.print_help()
        return 0
    if "--drop-in" not in line.others:
        remedy = shlex.join(["telegrad", "run", "--drop-in", *words])
        parser.error(f"--drop-in is required, there is no other way to run a program yet: {remedy}")
    command = _command(parser, line)
    sys.stdout.flush()
    # A fresh interpreter instead of this one: the program then has its usual __main__, sys.argv, sys.path, signals and
    # exit status.
    try:
        os.execve(command[0], command, child_environment())
    except OSError as e:
        parser.error(f"{command[0]} cannot be run: {e.strerror}")


def _command(parser: argparse.ArgumentParser, line: PythonLine) -> list[str]:
    """Return the command line of the program; its first word is a path."""
    mine = read(sys.orig_argv[1:])
    if mine.kind == "file":  # the options come from the installed script `telegrad`
        mine = read([])
    if {"E", "I", "S"} & (mine.letters | line.letters):
        parser.error(
            "the drop-in works through PYTHONPATH and sitecustomize, which -E, -I and -S turn off: leave them out"
        )
    name = line.rest[0] if line.kind == "file" else ""
    if not name or _is_for_python(Path(name)):
        return [sys.executable, *mine.options, *line.options, *line.rest]
    command = _find(name)
    if command is None:
        parser.error(f"there is no program or command {name!r}: name a file, -m MODULE, -c CODE or a command on PATH")
    if line.options:
        remedy = shlex.join(["telegrad", "run", "--drop-in", *line.options, command])
        parser.error(f"Python's options do not reach {name}, which is a command. If Python is to run it: {remedy}")
    return [command, *line.rest[1:]]


def _is_for_python(path: Path) -> bool:
    """Return whether Python runs the path.

    That is so for a folder with a `__main__.py`, and for a file that names no other interpreter.
    """
    if not path.is_file():  # a pipe's content can be read once
        return (path / "__main__.py").exists() if path.is_dir() else path.exists()
    with path.open("rb") as file:
        begin = file.readline(256)
    return not begin.startswith(b"\x7fELF") and (not begin.startswith(b"#!") or b"python" in begin)


def _find(name: str) -> str | None:
    """Return the path of a command, or None."""
    if os.path.dirname(name) or Path(name).is_file():
        return name if Path(name).is_file() else None
    # The scripts of this interpreter's environment come first: they can import Telegrad.
    return shutil.which(name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]))
