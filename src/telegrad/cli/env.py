"""``telegrad env``: the environment for launchers.

In it, every Python program runs on Telegrad.
"""

import argparse
import os
import shlex
from collections.abc import Sequence

__all__ = ["main"]

DESCRIPTION = """\
Prints the environment that replaces torch.distributed.rpc with Telegrad in every Python process that has it, as
`telegrad run --drop-in` does. It is for programs that a launcher starts: mpirun, srun, a container, a service.
"""

EPILOG = """\
examples:
  eval "$(telegrad env)"                           for this shell and its children
  (eval "$(telegrad env)"; mpirun -x PYTHONPATH -n 4 python train.py)
  telegrad env --plain >> job.env                  NAME=VALUE, for `docker run --env-file` or a service
"""


def main(words: Sequence[str]) -> int:
    """Print the environment and return the exit status.

    Args:
        words: arguments after ``telegrad env``.
    """
    from telegrad.compat import child_environment

    parser = argparse.ArgumentParser(
        prog="telegrad env",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plain", action="store_true", help="print NAME=VALUE instead of commands for the shell")
    plain = parser.parse_args(words).plain
    inherited = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
    for name, value in child_environment(inherited).items():
        print(f"{name}={value}" if plain else f"export {name}={shlex.quote(value)}")
    return 0
