"""``telegrad run``: a program that was written for ``torch.distributed.rpc``, on Telegrad."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

__all__ = ["main"]

DESCRIPTION = """\
Runs a Python program as `python PROGRAM ...` would, with Telegrad in the place of torch.distributed.rpc (and of
.autograd, .optim.DistributedOptimizer and .nn.RemoteModule): in the program itself and in all Python processes that it
starts, spawned or forked. The program is not changed, and does not notice.
"""

EPILOG = """\
examples:
  telegrad run --drop-in train.py --epochs 3
  telegrad run --drop-in -m torch.distributed.run --nproc-per-node 4 train.py
"""


def main(words: Sequence[str]) -> int:
    """Becomes the program. Returns an exit status only if it cannot.

    Args:
        words: what follows ``telegrad run``.
    """
    from telegrad.compat import child_environment

    # Our own options end where the program begins; argparse alone would take the program's options for ours.
    end = next((i for i, word in enumerate(words) if word == "-m" or not word.startswith("-")), len(words))
    parser = argparse.ArgumentParser(
        prog="telegrad run",
        usage="telegrad run --drop-in (PROGRAM | -m MODULE) [ARGUMENT ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--drop-in", action="store_true", help="put Telegrad in the place of torch's RPC")
    options = parser.parse_args(words[:end])
    program = words[end:]
    if not options.drop_in:
        parser.error("say --drop-in, there is no other way to run a program yet")
    if not program or program == ["-m"]:
        parser.error("which program?")
    if sys.flags.ignore_environment or sys.flags.no_site:
        parser.error("this works through PYTHONPATH and sitecustomize, which -E, -I and -S turn off")

    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    sys.stdout.flush()
    # A fresh interpreter rather than this one: the program then has __main__, sys.argv, sys.path, signals and its exit
    # status exactly as it would have without us.
    os.execve(sys.executable, [sys.executable, *flags, *program], child_environment())
