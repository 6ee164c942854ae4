"""Installation of the drop-in in every Python process.

Small packages replace torch and Telegrad.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from telegrad.compat import child_environment

OUTSIDE = getattr(sys, "_base_executable", sys.executable)

# The packages print what happens to them.
PACKAGES = {
    "torch/__init__.py": "import sys\nprint('torch')\nfrom torch import inner\ndone = True\n",
    "torch/inner.py": "",
    "telegrad/__init__.py": "",
    "telegrad/compat.py": "def install():\n    import torch\n    print('installed', torch.done)\n",
}


def run(folder: Path, code: str, packages: dict[str, str] = PACKAGES, **more: str) -> list[str]:
    """Return the lines that an interpreter with these packages prints for this code.

    It is the interpreter outside the virtual environment, in which neither torch nor Telegrad is installed.
    """
    for name, text in packages.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    environment = child_environment({**os.environ, "PYTHONPATH": str(folder), **more})
    done = subprocess.run(
        [OUTSIDE, "-c", code], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return (done.stdout + done.stderr).splitlines()


def test_installs_once_when_torch_is_imported(tmp_path: Path) -> None:
    code = "import torch.inner\nprint('program')\nimport torch\nfrom torch import inner"
    assert run(tmp_path, code) == ["torch", "installed True", "program"]


def test_costs_nothing_where_torch_is_not_imported(tmp_path: Path) -> None:
    code = "import sys\nprint([m for m in sys.modules if m.partition('.')[0] in ('torch', 'telegrad')])"
    assert run(tmp_path, code) == ["[]"]


def test_installs_after_a_search_for_torch(tmp_path: Path) -> None:
    code = (
        "import importlib.util as u\nassert u.find_spec('torch') and u.find_spec('torch')\nimport torch\nimport torch"
    )
    assert run(tmp_path, code) == ["torch", "installed True"]


def test_installs_after_an_import_that_failed(tmp_path: Path) -> None:
    failing = {"torch/__init__.py": "import builtins\nbuiltins.tried\ndone = True\n"}
    code = "import builtins\ntry:\n    import torch\nexcept AttributeError:\n    builtins.tried = True\nimport torch"
    assert run(tmp_path, code, {**PACKAGES, **failing}) == ["installed True"]


def test_torch_keeps_its_loader(tmp_path: Path) -> None:
    code = "import torch, importlib.util\nprint(type(torch.__spec__.loader).__name__, torch.__file__ is not None)"
    assert run(tmp_path, code)[-1] == "SourceFileLoader True"


def test_runs_the_sitecustomize_that_it_hides(tmp_path: Path) -> None:
    hidden = {"sitecustomize.py": "print('hidden')\nvalue = 5\n"}
    code = "import sitecustomize, torch\nprint(sitecustomize.value)"
    assert run(tmp_path, code, {**PACKAGES, **hidden}) == ["hidden", "torch", "installed True", "5"]


@pytest.mark.parametrize("start", ["subprocess", "spawn", "fork"])
def test_children_have_it(tmp_path: Path, start: str) -> None:
    if start == "subprocess":
        code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import torch'], check=True)"
    else:
        (tmp_path / "child.py").write_text("def main():\n    import torch\n")
        code = (
            "import multiprocessing, child\n"
            f"process = multiprocessing.get_context({start!r}).Process(target=child.main)\n"
            "process.start()\nprocess.join()\nassert process.exitcode == 0"
        )
    assert run(tmp_path, code) == ["torch", "installed True"]


def test_interpreter_without_telegrad_warns_and_continues(tmp_path: Path) -> None:
    broken = {**PACKAGES, "telegrad/compat.py": "raise ImportError('no core')"}
    lines = run(tmp_path, "import torch\nprint('program')", broken)
    assert "program" in lines
    assert any("runs on torch's own RPC: no core" in line for line in lines)


def test_interpreter_without_torch_raises_the_usual_error(tmp_path: Path) -> None:
    code = "try:\n    import torch\nexcept ModuleNotFoundError as e:\n    print(e)"
    assert run(tmp_path, code, {"empty.py": ""}) == ["No module named 'torch'"]


def test_environment_is_extended_and_not_changed() -> None:
    given = {"PYTHONPATH": os.pathsep.join(["/a", "/b"]), "X": "1"}
    once = child_environment(given)
    bootstrap, *rest = once["PYTHONPATH"].split(os.pathsep)
    assert rest == ["/a", "/b"]
    assert Path(bootstrap, "sitecustomize.py").is_file()
    assert child_environment(once) == once
    assert given == {"PYTHONPATH": os.pathsep.join(["/a", "/b"]), "X": "1"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", []), (":", ["", ""]), ("/a:", ["/a", ""]), (":/a", ["", "/a"]), ("/a::/b", ["/a", "", "/b"])],
)
def test_empty_entries_stay(given: str, expected: list[str]) -> None:
    """An empty entry of PYTHONPATH is the current folder."""
    once = child_environment({"PYTHONPATH": given.replace(":", os.pathsep)})
    assert once["PYTHONPATH"].split(os.pathsep)[1:] == expected
    assert child_environment(once) == once
