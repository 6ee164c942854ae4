"""The reinforcement-learning example: its arithmetic, and complete runs."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from example_helpers import import_module
from torch.distributions import Categorical

for package in ("gymnasium", "matplotlib", "rich"):
    pytest.importorskip(package)

EXAMPLE = Path(__file__).parents[2] / "examples" / "reinforcement_learning"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def policy() -> ModuleType:
    return import_module("rl_example_policy", EXAMPLE / "policy.py")


def run_example(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / "cartpole.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def rewards(output: str) -> list[str]:
    return re.findall(r"Last reward: (\d+)", output)


def test_returns_are_discounted_from_the_end(policy: ModuleType) -> None:
    assert policy.discounted_returns([1.0, 2.0, 4.0], 0.5) == [3.0, 4.0, 4.0]
    assert policy.discounted_returns([], 0.5) == []


def test_loss_equals_the_tutorials(policy: ModuleType) -> None:
    """Compare with the tutorial's step-by-step form, per observer."""
    torch.manual_seed(0)
    model = policy.Policy()
    short = policy.Trajectory(list(torch.randn(2, 4)), [0, 1], [1.0, 1.0])
    long = policy.Trajectory(list(torch.randn(3, 4)), [1, 1, 0], [1.0, 1.0, 1.0])

    returns = torch.tensor([1.5, 1.0, 1.75, 1.5, 1.0])
    returns = (returns - returns.mean()) / returns.std(correction=0)
    steps = []
    for state, action, value in zip(short.states + long.states, short.actions + long.actions, returns, strict=True):
        decision = Categorical(model(state.unsqueeze(0))[0])
        steps.append(-decision.log_prob(torch.tensor(action)) * value - 0.1 * decision.entropy())
    expected = torch.stack(steps).mean()

    loss = policy.reinforce_loss(model, [short, long], gamma=0.5, entropy=0.1)
    torch.testing.assert_close(loss, expected)


def played_without_batches(out: Path) -> list[str]:
    """Return the rewards of a short run."""
    plain = run_example("--smoke", "--out", str(out))
    assert plain.returncode == 0, plain.stderr
    assert "Traceback" not in plain.stderr
    assert "lost" not in plain.stderr  # all workers left gracefully
    assert len(rewards(plain.stdout)) == 3
    assert "speed-up" not in plain.stdout
    assert (out / "cartpole.png").read_bytes().startswith(PNG)
    return rewards(plain.stdout)


@pytest.mark.timeout(120)  # several processes, each of which imports torch
def test_smoke(tmp_path: Path) -> None:
    played_without_batches(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_both_variants_play_the_same_episodes(tmp_path: Path) -> None:
    """An observer's actions depend on the seed, not on order or batching of calls."""
    plain = played_without_batches(tmp_path / "plain")

    limit = ("--max-episodes", "3", "--log-interval", "1", "--compare-episodes", "1")
    batched = run_example("--batched", *limit, "--world-size", "4", "--out", str(tmp_path / "batched"))
    assert batched.returncode == 1, batched.stderr  # it gave up
    assert "Traceback" not in batched.stderr
    assert "lost" not in batched.stderr  # all workers left gracefully
    assert rewards(batched.stdout) == plain
    assert re.search(r"speed-up \d+\.\d\d", batched.stdout)
    assert "Not solved" in batched.stdout
    assert (tmp_path / "batched" / "cartpole.png").read_bytes().startswith(PNG)


def test_an_agent_without_observers_is_rejected() -> None:
    refused = run_example("--world-size", "1")
    assert refused.returncode == 2
    assert "usage:" in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_default_seed_solves_cartpole(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "cartpole.py"), "--out", str(tmp_path)]
    solved = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert solved.returncode == 0, solved.stdout + solved.stderr
    assert "Solved: running reward 475" in solved.stdout
