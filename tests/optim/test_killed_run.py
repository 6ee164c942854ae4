"""A run whose processes are killed continues from its checkpoint."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from model_helpers import Run

from telegrad import rpc
from telegrad.testing import Processes, cluster

STEPS, SAVED, KILLED = 8, 4, 6


def train_in_processes(rank: int, n: int, init_method: str, folder: str, die: bool, places: tuple[str, ...]) -> Any:
    """Run the trainer w0, which saves, and continues from a checkpoint if any."""
    options = rpc.Options(init_method=init_method)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=options)
    losses = None
    if rank == 0:
        run = Run(places)
        path = Path(folder)
        if (path / ".metadata").exists():
            run.load(path)
        while run.count < STEPS:
            losses = run.train(1)
            if run.count == SAVED:
                run.save(path)
            if die and run.count == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
        values = run.model.values()
        del run
    rpc.shutdown()
    return (losses, [value.tolist() for value in values]) if rank == 0 else None


@pytest.mark.timeout(180)
def test_a_killed_run_reaches_the_same_loss_bit_for_bit(tmp_path: Path) -> None:
    """The trainer and an owner are killed; the run continues on fewer workers."""
    with Processes(3, train_in_processes, str(tmp_path / "killed"), True, ("w1", "w2"), method="forkserver") as group:
        with pytest.raises(AssertionError, match="died with exit code -9"):
            group.results(60.0, ranks=[0])
        group.kill(1)
    with Processes(2, train_in_processes, str(tmp_path / "killed"), False, ("w1", "w0"), method="forkserver") as again:
        continued = again.results(60.0)[0]
    with cluster(3):
        run = Run(("w1", "w2"))
        losses = run.train(STEPS)
        values = [value.tolist() for value in run.model.values()]
        del run
    assert continued == ([losses[-1]], values)
