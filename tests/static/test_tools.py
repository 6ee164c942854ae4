"""The tools report in one line what the machine lacks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def compiler_is(compiler: str, path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", "set -euo pipefail; . tools/check_compiler.sh; check_compiler"],
        cwd=ROOT,
        env={**os.environ, "CXX": compiler, "PATH": path + os.pathsep + os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )


def program(path: Path, text: str) -> None:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def test_compiler_may_have_arguments(tmp_path: Path) -> None:
    program(tmp_path / "launcher", 'exec "$@"\n')
    program(tmp_path / "compiler", "cat >/dev/null\n")
    assert compiler_is("launcher compiler", str(tmp_path)).returncode == 0


@pytest.mark.parametrize(
    ("compiler", "text"),
    [("no-such-compiler", "there is no 'no-such-compiler'"), ("launcher old", "'launcher old' (9.1.0) is too old")],
)
def test_unsuitable_compiler(tmp_path: Path, compiler: str, text: str) -> None:
    program(tmp_path / "launcher", 'exec "$@"\n')
    program(tmp_path / "old", 'test "$1" = -dumpfullversion && echo 9.1.0\n')
    said = compiler_is(compiler, str(tmp_path))
    assert said.returncode == 1
    assert text in said.stderr
    assert said.stderr.count("\n") == 1


@pytest.mark.parametrize("tool", ["build_core.sh .venv {}", "test_core.sh .venv {} thread", "make_venv.sh {}"])
def test_tools_that_compile_look_for_a_compiler_first(tmp_path: Path, tool: str) -> None:
    said = subprocess.run(
        ["bash", "-c", "tools/" + tool.format(tmp_path / "folder")],
        cwd=ROOT,
        env={**os.environ, "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 1
    assert said.stderr.startswith("telegrad: needs a C++20 compiler, but there is no 'no-such-compiler'")


def configured(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run CMake's configure step as `pip install` does, with a changed environment."""
    python = environment.pop("python", sys.executable)
    cmake = Path(sys.executable).with_name("cmake")
    return subprocess.run(
        [cmake, "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DPython_EXECUTABLE={python}"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_pip_without_a_compiler_gets_one_sentence(tmp_path: Path) -> None:
    said = configured(tmp_path / "build", CXX="no-such-compiler")
    assert said.returncode == 1
    assert " telegrad: needs a C++20 compiler to build its core from source, but found none.\n" in said.stderr
    assert " On Debian: apt install g++. Or install a wheel, which needs no compiler.\n" in said.stderr


def test_pip_without_python_headers_gets_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sysconfig\nsysconfig.get_path = lambda name: '/no/headers'\n")
    python = tmp_path / "python"
    program(python, f'PYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    said = configured(tmp_path / "build", python=str(python))
    assert said.returncode == 1
    assert " telegrad: needs Python.h, which is not in /no/headers.\n" in said.stderr
    assert " On Debian: apt install python3-dev. Or install a wheel, which needs no headers.\n" in said.stderr
