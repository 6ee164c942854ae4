"""An unmodified program, run by the command, in all its processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import telegrad

PROGRAMS = Path(__file__).parent / "programs"


def run(*words: str, **how: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, **how)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_everyday_program(tmp_path: Path, start: str) -> None:
    done = run("-m", "telegrad", "run", "--drop-in", str(PROGRAMS / "everyday.py"), start, str(tmp_path))
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        expected = rf"worker{rank} ran on telegrad\S*; worker{(rank + 1) % 3} on telegrad"
        assert re.search(expected, done.stdout), done.stdout


@pytest.mark.slow
def test_everyday_program_is_one_that_torch_runs(tmp_path: Path) -> None:
    done = run(str(PROGRAMS / "everyday.py"), "fork", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ran on torch.distributed.rpc") == 3


def test_program_sees_what_python_would_show_it(tmp_path: Path) -> None:
    program = tmp_path / "show.py"
    program.write_text(
        "import sys\n"
        "print(__name__, sys.argv[1:], sys.path[0], sys.flags.optimize, sys.warnoptions)\n"
        "print(sys.modules['__main__'].__file__)\n"
        "raise SystemExit(7)\n"
    )
    words = [str(program), "--epochs", "3", "-m", "--drop-in"]
    plain = run("-O", "-W", "error", *words)
    ours = run("-O", "-W", "error", "-m", "telegrad", "run", "--drop-in", *words)
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert ours.returncode == 7


def test_module_is_run_as_one(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("import sys\nprint(__name__, __spec__.name, sys.argv[1:])\n")
    done = run("-m", "telegrad", "run", "--drop-in", "-m", "show", "-x", cwd=tmp_path)
    assert done.stdout == "__main__ show ['-x']\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "required: COMMAND"),
        (["walk"], "invalid choice: 'walk'"),
        (["run", "x.py"], "say --drop-in"),
        (["run", "--drop-in"], "which program?"),
        (["run", "--drop-in", "-m"], "which program?"),
        (["run", "--quickly", "x.py"], "unrecognized arguments: --quickly"),
    ],
)
def test_wrong_words(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    from telegrad.cli import main

    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_interpreter_that_ignores_the_environment_is_refused(tmp_path: Path) -> None:
    find = f"import sys; sys.path.insert(0, {str(Path(telegrad.__file__).parents[1])!r})"
    done = run("-E", "-c", f"{find}\nfrom telegrad.cli import main; main(['run', '--drop-in', 'x.py'])", cwd=tmp_path)
    assert done.returncode == 2
    assert "-E, -I and -S turn off" in done.stderr
