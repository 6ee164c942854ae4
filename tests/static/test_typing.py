"""Type checkers know what calls return: typed_program.py passes mypy and pyright."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import verify_types

ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(__file__).with_name("typed_program.py"))


def checked(*command: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    # The interpreter's own folder comes first: pyright asks the `python` on PATH for the location of packages.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [sys.executable, "-m", *command, program],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


CHECKERS = [
    pytest.param(("mypy", "--strict"), id="mypy", marks=pytest.mark.slow),
    pytest.param(("basedpyright",), id="pyright"),
]


@pytest.mark.parametrize("checker", CHECKERS)
def test_results_have_the_types_of_what_is_called(checker: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip(checker[0])
    said = checked(*checker)
    assert said.returncode == 0, said.stdout + said.stderr

    wrong = tmp_path / "wrong.py"  # the checkers must report wrong result types
    wrong.write_text("from telegrad import rpc\n\nx: str = rpc.rpc_sync('w1', len, ('abc',))\n")
    said = checked(*checker, program=str(wrong))
    assert said.returncode == 1, said.stdout + said.stderr
    assert "wrong.py:3" in said.stdout
    assert '"int"' in said.stdout


def test_the_check_of_public_types_finds_what_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("basedpyright")
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "py.typed").touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    (package / "__init__.py").write_text(
        "class C:\n    def __init__(self, x: int) -> None:\n        self.x: int = max(x, 0)\n"
    )
    assert verify_types.incomplete("some_package", environment) == []
    (package / "__init__.py").write_text(
        "class C:\n    def __init__(self, x: int) -> None:\n        self.x = max(x, 0)\n"
    )
    lacking = verify_types.incomplete("some_package", environment)
    assert [line.partition(":")[0] for line in lacking] == ["some_package.C", "some_package.C.x"]
    assert "__init__.py:3: Type is missing type annotation" in lacking[1]
    with pytest.raises(RuntimeError, match="no_such_package"):
        verify_types.incomplete("no_such_package", environment)
