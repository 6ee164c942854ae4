"""Command lines of `telegrad run --drop-in`, and `telegrad env`."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import telegrad
from telegrad.cli import main

PYTHON = [sys.executable]
OURS = [sys.executable, "-m", "telegrad", "run", "--drop-in"]
SHOW = """
import os, sys
from importlib.util import find_spec
print(__name__, sys.argv, repr(sys.path[0]), sys.flags.optimize, sys.flags.dev_mode, sys.warnoptions)
print(sys.stdout.write_through, getattr(sys.modules['__main__'], '__file__', None))
sys.stderr.write('drop-in ' * ('bootstrap' in os.environ.get('PYTHONPATH', '')))
raise SystemExit(7)
"""


def run(*words: str, **how: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True, check=False, **{"timeout": 50, **how})


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Return a folder with the program `SHOW` as a file, a package and a folder."""
    for name in ("show.py", "package/__init__.py", "package/__main__.py", "folder/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "__init__" in name else SHOW)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["show.py", "--epochs", "3", "-m", "--drop-in"],
        ["folder", "-u"],
        ["-m", "show", "-x"],
        ["-m", "package", "--help"],
        ["-c", SHOW, "-c"],
        ["-", "-u"],
        [],
        ["-u", "-OO", "-W", "error", "-Xdev", "show.py"],
        ["-uOc" + SHOW, "--", "-"],
        ["-i", "show.py"],
        ["--", "show.py"],
    ],
    ids=lambda words: " ".join(words).replace(SHOW, "CODE").replace("\n", " "),
)
def test_it_takes_what_python_takes(programs: Path, words: list[str]) -> None:
    given = "sys.exit(8)\n" if "-i" in words else SHOW
    plain, ours = (run(*python, *words, cwd=programs, input=given) for python in (PYTHON, OURS))
    assert ours.stderr.startswith("drop-in ")
    assert (ours.returncode, ours.stdout, ours.stderr[8:]) == (plain.returncode, plain.stdout, plain.stderr)
    assert ours.returncode == (8 if "-i" in words else 7)


def test_options_of_the_interpreter_that_runs_us_reach_the_program(programs: Path) -> None:
    flags = ["-u", "-O", "-W", "error"]
    plain = run(*PYTHON, *flags, "show.py", cwd=programs)
    ours = run(*PYTHON, *flags, *OURS[1:], "show.py", cwd=programs)
    assert (ours.returncode, ours.stdout) == (7, plain.stdout)


def test_pytest_is_run_as_a_module(tmp_path: Path) -> None:
    test = "def test_rpc():\n    from torch.distributed import rpc\n    assert rpc.__name__ == 'telegrad.compat.rpc'\n"
    (tmp_path / "test_it.py").write_text(test)
    ran = run(*OURS, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout


@pytest.mark.parametrize("kind", ["script of Python", "script of the shell", "by path"])
def test_a_command_is_run_as_it_is(programs: Path, kind: str) -> None:
    python = kind == "script of Python"
    command = programs / "bin" / "show-it"
    command.parent.mkdir()
    command.write_text(
        f"#!{sys.executable}\n{SHOW}" if python else f'#!/bin/sh\nexec "{sys.executable}" show.py "$@"\n'
    )
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}
    name = "bin/show-it" if kind == "by path" else "show-it"
    plain = run(str(command), "-u", "x", cwd=programs)
    ours = run(*OURS, name, "-u", "x", cwd=programs, env=environment)
    assert (ours.returncode, ours.stdout, ours.stderr) == (7, plain.stdout, "drop-in ")


def test_a_command_of_this_environment_comes_before_others(programs: Path) -> None:
    (programs / "python").write_text("#!/bin/sh\nexit 1\n")
    (programs / "python").chmod(0o755)
    (programs / "elsewhere").mkdir()
    ours = run(*OURS, "python", "../show.py", cwd=programs / "elsewhere", env={**os.environ, "PATH": str(programs)})
    assert ours.returncode == 7, ours.stderr


# ---- torchrun, around and below

TRAINER = """
import os, sys
from torch.distributed import rpc

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"w{rank}", rank=rank, world_size=size)
with open(f"{sys.argv[1]}/{rank}", "w") as out:
    out.write(f"{rpc.__name__} {rpc.rpc_sync(f'w{1 - rank}', abs, (-5,))}")
rpc.shutdown()
"""
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2"]
AGENT = [*PYTHON, "-m", "torch.distributed.run", *TORCHRUN[1:]]
SCRIPT = Path(sysconfig.get_path("scripts"), "telegrad")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "words",
    [
        pytest.param([*OURS, *TORCHRUN], id="around"),
        pytest.param([*AGENT, "--no-python", str(SCRIPT), *OURS[3:]], id="command below", marks=pytest.mark.slow),
        pytest.param([*AGENT, "-m", "telegrad", *OURS[3:]], id="module below", marks=pytest.mark.slow),
    ],
)
def test_torchrun(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    ran = run(*words, "trainer.py", str(tmp_path), cwd=tmp_path, timeout=110)
    assert ran.returncode == 0, ran.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["telegrad.compat.rpc 5"] * 2


# ---- the environment for others


@pytest.mark.parametrize("before", [pytest.param(None, marks=pytest.mark.slow), "/a b"])
def test_env_is_for_a_shell(programs: Path, before: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": before} if before else {}
    code = (
        "import os, torch.distributed.rpc as rpc; print(rpc.__name__, os.environ['PYTHONPATH'].split(os.pathsep)[1:])"
    )
    script = f'eval "$("{sys.executable}" -m telegrad env)"; "{sys.executable}" -c "{code}"'
    ran = run("/bin/sh", "-c", script, cwd=programs, env=environment)
    assert (ran.returncode, ran.stdout) == (0, f"telegrad.compat.rpc {[before] if before else []}\n"), ran.stderr
    plain = run(*PYTHON, "-m", "telegrad", "env", "--plain", env=environment)
    name, _, value = plain.stdout.rstrip("\n").partition("=")
    assert name == "PYTHONPATH"
    assert value.split(os.pathsep)[1:] == ([before] if before else [])


# ---- words that are wrong, or too few


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["train.py", "-x"], "choose one of demo, env, run. To run a program: telegrad run --drop-in train.py -x"),
        (["--quickly"], "there is no command '--quickly'"),
        (["env", "x"], "unrecognized arguments: x"),
        (["run", "x.py", "-a b"], "there is no other way to run a program yet: telegrad run --drop-in x.py"),
        (["run", "--drop-in", "-m"], "-m needs an argument: -m MODULE"),
        (["run", "--drop-in", "--quickly", "x.py"], "no option --quickly. Python's options and --drop-in come before"),
        (["run", "--drop-in", "no-such.py"], "'no-such.py': name a file, -m MODULE, -c CODE or a command on PATH"),
        (["run", "--drop-in", "no/such.py"], "no program or command 'no/such.py'"),
        (["run", "--drop-in", "-O", "pytest"], "If Python is to run it: telegrad run --drop-in -O /"),
        (["run", "--drop-in", "-uE", "x.py"], "-E, -I and -S turn off: leave them out"),
    ],
)  # fmt: skip
def test_wrong_words_get_the_remedy(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["run", "-h"], ["run", "--drop-in", "--help", "x.py"]])
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("usage: telegrad")


def test_a_file_that_cannot_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.sh").write_text("#!/bin/sh\n")
    with pytest.raises(SystemExit):
        main(["run", "--drop-in", str(tmp_path / "train.sh")])
    assert "train.sh cannot be run: Permission denied" in capsys.readouterr().err


def test_interpreter_that_ignores_the_environment_is_refused(tmp_path: Path) -> None:
    find = f"import sys; sys.path.insert(0, {str(Path(telegrad.__file__).parents[1])!r})"
    code = f"{find}\nfrom telegrad.cli import main; main(['run', '--drop-in', 'x.py'])"
    done = run(*PYTHON, "-E", "-c", code, cwd=tmp_path)
    assert done.returncode == 2
    assert "-E, -I and -S turn off" in done.stderr
