"""Packages that use torch.distributed.rpc run over the drop-in.

`make dependents` installs them and runs this. The programs do the same as the packages' own tests, which their wheels
lack. Each runs over torch as well: start it with `python` instead of `telegrad run --drop-in`.
"""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
LIMIT = 300.0  # s; on an idle machine about 30 s, most of them imports
CLASSES = ("single", "sync", "async")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT + 30)]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        find_spec(package) is None, reason=f"{package} is not installed here, see make dependents"
    )


def run(program: str, *words: str) -> None:
    """Run a program over the drop-in; check that all its processes succeed."""
    command = [sys.executable, "-m", "telegrad", "run", "--drop-in", str(PROGRAMS / program), *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, err
    assert "done on telegrad.compat.rpc" in out
    assert " is lost: " not in err
    assert "Traceback" not in err


@needs("torchrl")
@pytest.mark.parametrize("frames", ["50", "100", "200"])
def test_torchrl_collector(frames: str) -> None:
    run("torchrl_collector.py", "basic", frames)


@needs("torchrl")
@pytest.mark.parametrize("sync", ["yes", "no"])
def test_torchrl_collector_synchronous(sync: str) -> None:
    run("torchrl_collector.py", "synchronous", sync)


@needs("torchrl")
@pytest.mark.parametrize("name", CLASSES)
def test_torchrl_collector_class(name: str) -> None:
    run("torchrl_collector.py", "collector_class", name)


@needs("torchrl")
@pytest.mark.parametrize("sync", ["yes", "no"])
@pytest.mark.parametrize("name", CLASSES)
def test_torchrl_policy_update(name: str, sync: str) -> None:
    run("torchrl_collector.py", "update_policy", name, sync)


@needs("torchrl")
@pytest.mark.parametrize("what", ["tests", "example"])
def test_torchrl_remote_replay_buffer(what: str) -> None:
    run("torchrl_buffer.py", what)


@needs("torch_geometric")
def test_pyg_feature_lookup() -> None:
    run("pyg_features.py")


@needs("torch_geometric")
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("how", ["spawn", "main"])
def test_pyg_loader_that_atexit_shuts_down(how: str, mode: str) -> None:
    run("pyg_loader.py", how, mode)
