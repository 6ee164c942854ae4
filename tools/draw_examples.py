"""Draw the pictures of docs/examples.md: run the examples and copy their figures.

    python tools/draw_examples.py                      # all, one after the other: about 4 minutes on 2 cores
    python tools/draw_examples.py pipeline cartpole    # some, by name

Each example draws its own figure, from what its run has measured; the pictures go to docs/pictures. A run that misses
its goal leaves the picture as it is. Times in the pictures depend on the machine: leave it idle.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"


def programs() -> dict[str, Path]:
    """Return the programs of the examples, by the names of their pictures."""
    files = [*sorted((ROOT / "examples").glob("*.py")), ROOT / "examples" / "reinforcement_learning" / "cartpole.py"]
    return {path.stem: path for path in files}


def draw(name: str, *options: str, folder: Path = PICTURES) -> bool:
    """Run an example, and write its picture to `folder`; return whether it succeeded."""
    with tempfile.TemporaryDirectory() as made:
        command = [sys.executable, str(programs()[name]), "--out", made, *options]
        if subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, check=False).returncode:
            return False
        shutil.copy(Path(made) / f"{name}.svg", folder / f"{name}.svg")
    return True


def main(words: Sequence[str]) -> int:
    """Draw the pictures that the arguments name; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(programs())}; all by default")
    names = parser.parse_args(words).names or list(programs())
    if unknown := set(names) - programs().keys():
        parser.error(f"there is no example {', '.join(sorted(unknown))}")
    missed = [name for name in names if not draw(name)]
    if missed:
        print(f"not drawn, because the run failed or missed its goal: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
