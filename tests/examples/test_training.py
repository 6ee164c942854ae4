"""The training examples, run as a user runs them: in short by `make test`, in full by `make test-slow`."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("matplotlib", "rich", "sklearn"):
    pytest.importorskip(package)

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(file.stem for file in EXAMPLES.glob("*.py"))
PNG = b"\x89PNG\r\n\x1a\n"


def start(name: str, out: Path, *args: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--out", str(out), *args]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=out.parent, env=environment
    )


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def ends_well(process: "subprocess.Popen[str]", timeout: float) -> str:
    """Its output, after it has ended with status 0, and no worker has been lost or has failed."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, out + err
    assert "Traceback" not in err
    assert "lost" not in err
    return out


def test_there_are_six() -> None:
    assert len(NAMES) == 6


@pytest.mark.parametrize("name", NAMES)
def test_fits_on_a_few_screens(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 150


@pytest.mark.timeout(120)  # up to six processes, each of which imports torch
@pytest.mark.parametrize("name", NAMES)
def test_smoke(name: str, tmp_path: Path) -> None:
    out = ends_well(start(name, tmp_path / "new", "--smoke"), 110)
    assert "\nReached: " in out
    assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(PNG)


@pytest.mark.timeout(120)
def test_one_process_a_terminal(tmp_path: Path) -> None:
    """The parameter server as PyTorch's tutorial starts it: the server, then the trainers, each by a command."""
    group = ["--world_size=3", "--num_gpus=0", "--master_addr=localhost", f"--master_port={free_port()}", "--smoke"]
    server, *trainers = (start("parameter_server", tmp_path / "out", *group, f"--rank={rank}") for rank in range(3))
    for rank, trainer in enumerate(trainers, 1):
        assert f"Rank {rank} epoch 1 batch 0 loss" in ends_well(trainer, 110)
    assert "\nReached: " in ends_well(server, 110)


@pytest.mark.timeout(120)
def test_a_claim_that_is_not_reached_is_said(tmp_path: Path) -> None:
    process = start("batched_parameter_server", tmp_path / "out", "--trainers", "2", "--updates", "1")
    out, err = process.communicate(timeout=110)
    assert process.returncode == 1, out + err
    assert "\nNOT REACHED: accuracy" in out
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", NAMES)
def test_in_full(name: str, tmp_path: Path) -> None:
    assert "\nReached: " in ends_well(start(name, tmp_path / "out"), 380)
