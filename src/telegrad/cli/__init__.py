"""The ``telegrad`` command.

It uses only the standard library, because it has to start if no package but Telegrad is installed.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence

from telegrad import __version__
from telegrad.cli import demo, env, run

__all__ = ["main"]

COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "demo": (demo.main, "run one of the example programs"),
    "env": (env.main, "print the environment in which Python programs run as under `run --drop-in`"),
    "run": (run.main, "run a program that was written for torch.distributed.rpc"),
}
"""Name -> function, help text."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Without arguments it prints the help.

    Args:
        arguments: the words after ``telegrad``; those of this process if not given.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in COMMANDS:
        return COMMANDS[words[0]][0](words[1:])
    parser = argparse.ArgumentParser(
        prog="telegrad",
        usage="telegrad COMMAND [ARGUMENT ...]",
        description="Tensor-native RPC for PyTorch.",
        epilog="commands (COMMAND --help tells more):\n"
        + "\n".join(f"  {name:12}{help}" for name, (_, help) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"telegrad {__version__}")
    if words:
        _, unknown = parser.parse_known_args(words)
        remedy = shlex.join(["telegrad", "run", "--drop-in", *words])
        parser.error(
            f"there is no command {unknown[0]!r}; choose one of {', '.join(COMMANDS)}. To run a program: {remedy}"
        )
    parser.print_help()
    return 0
