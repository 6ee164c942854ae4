"""Takes rules out of the core, one at a time, and checks that a test fails.

Called as mutants.py VENV BUILD_FOLDER [NAMES]. `csrc/tests/mutants.toml` has the rules. The sources are copied, so the
tree does not change. Exits with 1 if a mutant survives, or does not compile.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("CMakeLists.txt", "pyproject.toml", "cmake", "csrc")
LIMIT = 300.0  # s for a test program


class Mutant(NamedTuple):
    """A rule to take out."""

    name: str
    file: str  # below csrc
    old: str  # occurs once in the file
    new: str
    test: str  # a program of csrc/tests, without its ending
    case: str = ""  # part of the names of its cases; empty: all


def load() -> list[Mutant]:
    """Return the mutants of the table."""
    table = tomllib.loads((ROOT / "csrc/tests/mutants.toml").read_text())
    return [Mutant(name, **fields) for name, fields in table.items()]


def copy(tree: Path) -> None:
    """Copy the sources; files that have not changed keep their times."""
    for name in COPIED:
        for source in (path for path in (ROOT / name, *(ROOT / name).rglob("*")) if path.is_file()):
            target = tree / source.relative_to(ROOT)
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


class Builder:
    """Builds and runs the tests of the copied tree."""

    def __init__(self, venv: Path, tree: Path) -> None:
        self._tree = tree
        self._folder = tree / "build"
        self._env = os.environ | {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}
        if not (self._folder / "build.ninja").exists():
            kind = ("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0")
            parts = ("-DTELEGRAD_BUILD_PYTHON=OFF", "-DTELEGRAD_BUILD_TESTS=ON")
            found = (f"-DCMAKE_PREFIX_PATH={venv}", f"-DPython_EXECUTABLE={venv / 'bin/python'}")
            self._run("cmake", "-S", tree, "-B", self._folder, "-G", "Ninja", *kind, *parts, *found)

    def _run(self, *command: object) -> None:
        done = subprocess.run(list(map(str, command)), env=self._env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)

    def build(self, tests: set[str]) -> None:
        """Build test programs.

        Raises:
            RuntimeError: The sources do not compile; the text is the compiler's.
        """
        self._run("cmake", "--build", self._folder, "--target", *sorted(tests))

    def ends(self, test: str, case: str) -> str:
        """Return how a test program ends: it passes, fails, or hangs."""
        command = [str(self._folder / test), *([case] if case else [])]
        try:
            done = subprocess.run(command, env=self._env, capture_output=True, timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired:
            return "hangs"
        return "fails" if done.returncode else "passes"


def end_without(mutant: Mutant, tree: Path, builder: Builder) -> str:
    """Return how the test ends without the rule.

    Raises:
        RuntimeError: The rule is not where the table says, or the mutant does not compile.
    """
    path = tree / "csrc" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise RuntimeError(f"{mutant.file} has the text {text.count(mutant.old)} times: {mutant.old}")
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        builder.build({mutant.test})
        return builder.ends(mutant.test, mutant.case)
    finally:
        path.write_text(text)


def main() -> int:
    venv, folder, *names = sys.argv[1:]
    tree = Path(folder).resolve()
    mutants = [m for m in load() if not names or m.name in names]
    copy(tree)
    builder = Builder(Path(venv).resolve(), tree)
    builder.build({m.test for m in mutants})
    failed = [m.test for m in mutants if builder.ends(m.test, m.case) != "passes"]
    if failed:
        print(f"fail without any mutant: {', '.join(failed)}")
        return 1
    alive = 0
    for mutant in mutants:
        try:
            end = end_without(mutant, tree, builder)
        except RuntimeError as e:
            print(f"BROKEN   {mutant.name}\n{e}", flush=True)
            alive += 1
            continue
        alive += end == "passes"
        print(f"{'SURVIVED' if end == 'passes' else 'killed  '} {mutant.name}: {mutant.test} {end}", flush=True)
    print(f"{len(mutants) - alive} of {len(mutants)} mutants are killed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
