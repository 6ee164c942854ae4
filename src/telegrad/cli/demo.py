"""``telegrad demo``: the example programs, from the wheel or from a checkout."""

import argparse
import ast
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

__all__ = ["main"]

DEFAULT = "parameter_server"
NEEDED = {"gymnasium": "gymnasium", "matplotlib": "matplotlib", "rich": "rich", "sklearn": "scikit-learn"}
"""Module -> distribution that contains it."""

EPILOG = """\
examples:
  telegrad demo                            the default, parameter_server
  telegrad demo pipeline --stages 3
  telegrad demo cartpole --smoke           a few episodes, to check within seconds that it works
  telegrad demo pipeline --help            the options of that program

Figures go to ./telegrad-demo, unless --out names another folder.
"""


def main(words: Sequence[str]) -> int:
    """Run an example instead of this process.

    Return an exit status only on failure.

    Args:
        words: arguments after ``telegrad demo``: the name of an example, then its own options.
    """
    programs = _programs(_folder())
    names = "\n".join(f"  {name:26}{_summary(path)}" for name, path in programs.items())
    parser = argparse.ArgumentParser(
        prog="telegrad demo",
        usage="telegrad demo [NAME] [ARGUMENT ...]",
        description=f"Runs an example program.\n\nprograms:\n{names}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    name, rest = (words[0], words[1:]) if words and not words[0].startswith("-") else (DEFAULT, words)
    if words and words[0] in ("-h", "--help"):
        parser.parse_args(words[:1])
    if name not in programs:
        parser.error(f"there is no example '{name}'; choose one of {', '.join(programs)}")
    missing = [distribution for module, distribution in NEEDED.items() if find_spec(module) is None]
    if missing:
        parser.error(f"the examples need {', '.join(missing)}: pip install 'telegrad[examples]'")
    if not any(word.partition("=")[0] == "--out" for word in rest):
        rest = ["--out", str(Path("telegrad-demo").absolute()), *rest]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(programs[name]), *rest])


def _folder() -> Path:
    """Return the folder of the examples.

    It is inside the installed package, or next to `src` in a checkout.
    """
    package = Path(__file__).parents[1]
    installed, checkout = package / "examples", package.parents[1] / "examples"
    return installed if installed.is_dir() else checkout


def _programs(folder: Path) -> dict[str, Path]:
    programs = {path.stem: path for path in sorted(folder.glob("*.py"))}
    return programs | {"cartpole": folder / "reinforcement_learning" / "cartpole.py"}


def _summary(program: Path) -> str:
    """Return the first line of the program's docstring, without its period."""
    doc = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0].rstrip(".")
