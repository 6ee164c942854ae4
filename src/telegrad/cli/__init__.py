"""The ``telegrad`` command. Standard library only: it has to start where nothing but Telegrad is installed."""

import argparse
import sys
from collections.abc import Callable, Sequence

from telegrad import __version__
from telegrad.cli import demo, run

__all__ = ["main"]

COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "demo": (demo.main, "run one of the example programs"),
    "run": (run.main, "run a program that was written for torch.distributed.rpc"),
}
"""Name, what runs it, what it does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    Args:
        arguments: the words after ``telegrad``; those of this process if not given.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in COMMANDS:
        return COMMANDS[words[0]][0](words[1:])
    parser = argparse.ArgumentParser(
        prog="telegrad",
        description="Tensor-native RPC for PyTorch.",
        epilog="commands:\n" + "\n".join(f"  {name:12}{help}" for name, (_, help) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"telegrad {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="what to do; COMMAND --help tells more")
    parser.parse_args(words)
    return 2
