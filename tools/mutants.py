"""Takes rules out of the sources, one at a time, and checks that a test fails.

Called as mutants.py VENV BUILD_FOLDER [NAMES]. Rules of the core are in `csrc/tests/mutants.toml`, of the bindings in
`csrc/python/mutants.toml`, and of the package in Python in `tests/mutants.toml`. The sources are copied, so the tree
does not change. Exits with 1 if a mutant survives, or does not compile.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

ROOT = Path(__file__).parents[1]
LIMIT = 300.0  # s for a test program


class Mutant(NamedTuple):
    """A rule to take out."""

    name: str
    file: str  # below the folder of the suite's sources
    old: str  # occurs once in the file
    new: str
    test: str  # a program of csrc/tests, without its ending; or a file below tests
    case: str = ""  # part of the names of its cases; empty: all


class Suite(Protocol):
    """Sources with their tests."""

    name: str
    table: str
    sources: str

    def prepare(self, tree: Path, mutants: Sequence[Mutant]) -> None:
        """Make the copied tree ready to run the tests of the mutants."""

    def ends(self, mutant: Mutant) -> str:
        """Return how the test of a mutant ends in the tree: it passes, fails, or hangs.

        Raises:
            RuntimeError: The sources do not compile; the text is the compiler's.
        """


class CMake:
    """Build folder of a tree, without optimization.

    Args:
        venv: Environment with the build tools.
        tree: Sources.
        parts: Definitions of CMake: what to build.
    """

    def __init__(self, venv: Path, tree: Path, *parts: str) -> None:
        self.folder = tree / "build"
        self._env = os.environ | {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}
        if not (self.folder / "build.ninja").exists():
            kind = ("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0")
            found = (f"-DCMAKE_PREFIX_PATH={venv}", f"-DPython_EXECUTABLE={venv / 'bin/python'}")
            self._run("cmake", "-S", tree, "-B", self.folder, "-G", "Ninja", *kind, *parts, *found)

    def build(self, targets: set[str]) -> None:
        """Build targets.

        Raises:
            RuntimeError: The sources do not compile.
        """
        self._run("cmake", "--build", self.folder, "--target", *sorted(targets))

    def _run(self, *command: object) -> None:
        done = subprocess.run(list(map(str, command)), env=self._env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)


class Core:
    """The core in C++, built without optimization.

    Args:
        venv: Environment with the build tools.
    """

    name = "core"
    table = "csrc/tests/mutants.toml"
    sources = "csrc"

    def __init__(self, venv: Path) -> None:
        self._venv = venv

    def prepare(self, tree: Path, mutants: Sequence[Mutant]) -> None:
        copy(tree, ("CMakeLists.txt", "pyproject.toml", "cmake", "csrc"))
        self._cmake = CMake(self._venv, tree, "-DTELEGRAD_BUILD_PYTHON=OFF", "-DTELEGRAD_BUILD_TESTS=ON")
        self._cmake.build({mutant.test for mutant in mutants})

    def ends(self, mutant: Mutant) -> str:
        self._cmake.build({mutant.test})
        program = str(self._cmake.folder / mutant.test)
        return ending([program, *([mutant.case] if mutant.case else [])], dict(os.environ))


class Python:
    """The package in Python, with the core of the tree.

    Its tests run in an environment of their own.

    Args:
        venv: Environment with the packages that the tests need.
    """

    name = "python"
    table = "tests/mutants.toml"
    sources = "src/telegrad"

    def __init__(self, venv: Path) -> None:
        self._venv = venv

    def prepare(self, tree: Path, mutants: Sequence[Mutant]) -> None:
        copy(tree, ("pyproject.toml", "src", "tests", "tools", "bench", "examples"))
        self._tree = tree
        subprocess.run([self._venv / "bin/python", "-m", "venv", "--without-pip", tree / "venv"], check=True)
        (packages,) = (self._venv / "lib").glob("python*/site-packages")
        (mine,) = (tree / "venv/lib").glob("python*/site-packages")
        (mine / "shared.pth").write_text(f"{tree / 'src'}\n{packages}\n")

    def ends(self, mutant: Mutant) -> str:
        command = [str(self._tree / "venv/bin/python"), "-m", "pytest", "-q", "-x", f"tests/{mutant.test}"]
        return ending([*command, *(["-k", mutant.case] if mutant.case else [])], dict(os.environ), self._tree)


class Bindings(Python):
    """The bindings in C++, under the tests in Python."""

    name = "bindings"
    table = "csrc/python/mutants.toml"
    sources = "csrc/python"

    def prepare(self, tree: Path, mutants: Sequence[Mutant]) -> None:
        copy(tree, ("CMakeLists.txt", "cmake", "csrc"))
        super().prepare(tree, mutants)
        self._cmake = CMake(self._venv, tree)

    def ends(self, mutant: Mutant) -> str:
        self._cmake.build({"_core"})
        for module in self._cmake.folder.glob("_core.*.so"):
            shutil.copyfile(module, self._tree / "src/telegrad" / module.name)
        return super().ends(mutant)


def ending(command: Sequence[str], env: dict[str, str], folder: Path | None = None) -> str:
    """Run a test; return how it ends."""
    try:
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return "hangs"
    return "fails" if done.returncode else "passes"


def load(suite: Suite) -> list[Mutant]:
    """Return the mutants of a suite's table."""
    table = tomllib.loads((ROOT / suite.table).read_text())
    return [Mutant(name, **fields) for name, fields in table.items()]


def copy(tree: Path, names: Sequence[str]) -> None:
    """Copy files and folders; files that have not changed keep their times."""
    for name in names:
        for source in (path for path in (ROOT / name, *(ROOT / name).rglob("*")) if path.is_file()):
            target = tree / source.relative_to(ROOT)
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


def end_without(mutant: Mutant, tree: Path, suite: Suite) -> str:
    """Return how the test ends without the rule.

    Raises:
        RuntimeError: The rule is not where the table says, or the mutant does not compile.
    """
    path = tree / suite.sources / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise RuntimeError(f"{mutant.file} has the text {text.count(mutant.old)} times: {mutant.old}")
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        return suite.ends(mutant)
    finally:
        path.write_text(text)


def survivors(suite: Suite, tree: Path, mutants: Sequence[Mutant]) -> tuple[int, int]:
    """Try the mutants; return how many survive, and how many tests fail without any."""
    suite.prepare(tree, mutants)
    failed = [m for m in {(m.test, m.case): m for m in mutants}.values() if suite.ends(m) != "passes"]
    for mutant in failed:
        print(f"FAILS without any mutant: {mutant.test} {mutant.case}")
    alive = 0
    for mutant in mutants:
        try:
            end = end_without(mutant, tree, suite)
        except RuntimeError as e:
            print(f"BROKEN   {mutant.name}\n{e}", flush=True)
            alive += 1
            continue
        alive += end == "passes"
        print(f"{'SURVIVED' if end == 'passes' else 'killed  '} {mutant.name}: {mutant.test} {end}", flush=True)
    return alive, len(failed)


SUITES: tuple[Callable[[Path], Suite], ...] = (Core, Bindings, Python)


def main() -> int:
    venv, folder, *names = sys.argv[1:]
    alive = broken = count = 0
    for make in SUITES:
        suite = make(Path(venv).resolve())
        mutants = [m for m in load(suite) if not names or m.name in names]
        if mutants:
            count += len(mutants)
            found = survivors(suite, Path(folder).resolve() / suite.name, mutants)
            alive, broken = alive + found[0], broken + found[1]
    print(f"{count - alive} of {count} mutants are killed")
    return 1 if alive or broken else 0


if __name__ == "__main__":
    sys.exit(main())
