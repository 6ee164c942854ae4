"""Programs started and restarted by the real torchrun."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from free_ports import free_port

from telegrad.testing import eventually

PROGRAMS = Path(__file__).parent
AGENT = ("-m", "torch.distributed.run", "--monitor-interval", "0.05")
LIMIT = 50.0  # s; about 10 s of processor time, most of it imports


class Launcher:
    """Starts agents and waits for them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self._agents: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self.folder / f"agent{len(self._agents)}.log").open("wb"))
        agent = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log)
        self._stack.callback(agent.wait)
        self._stack.callback(agent.terminate)
        self._agents.append(agent)
        return agent

    def kill(self, agent: subprocess.Popen[bytes], *workers: int) -> None:
        """Kill an agent and its workers, as the end of their host does."""
        for process in (agent.pid, *workers):
            os.kill(process, signal.SIGKILL)
        self._agents.remove(agent)

    def make_pipe(self) -> None:
        """Create a pipe; a worker that reads from it ends with the test at the latest."""
        os.mkfifo(self.folder / "pipe")
        self._stack.callback(self._end_readers)

    def _end_readers(self) -> None:
        with suppress(OSError):
            self.open_pipe()

    def open_pipe(self) -> None:
        """Open the pipe; raise OSError without a reader."""
        os.close(os.open(self.folder / "pipe", os.O_WRONLY | os.O_NONBLOCK))

    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("agent*.log")))

    def finish(self) -> None:
        for agent in self._agents:
            assert agent.wait(LIMIT) == 0, self.output()

    def done(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("done*"))]


@pytest.fixture
def torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with ExitStack() as stack:
        yield Launcher(tmp_path, stack)


@pytest.mark.slow
def test_a_rank_is_killed_in_each_of_two_attempts(torchrun: Launcher) -> None:
    words = (*AGENT, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    torchrun.start(*words, str(PROGRAMS / "member_program.py"), str(torchrun.folder), "1", "0")
    torchrun.finish()
    assert torchrun.done() == [f"w{rank} {rank} of 2 in attempt 2" for rank in range(2)]


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_of_the_first_attempt_still_runs(torchrun: Launcher, victim: int) -> None:
    """The new attempt forms without it, and it leaves its own group in order."""
    torchrun.make_pipe()
    words = (*AGENT, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    torchrun.start(*words, str(PROGRAMS / "survivor_program.py"), str(torchrun.folder), str(victim))
    torchrun.finish()
    assert torchrun.done() == ["attempt 1"] * 2
    survived = torchrun.folder / f"survived{1 - victim}"
    assert not survived.exists()
    torchrun.open_pipe()
    eventually(survived.exists)


@pytest.mark.slow
def test_two_agents_that_count_differently(torchrun: Launcher) -> None:
    """An agent counts only the restarts that its own workers have caused."""
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "job")
    for _ in range(2):
        words = (*AGENT, "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", *where)
        torchrun.start(*words, str(PROGRAMS / "member_program.py"), str(torchrun.folder), "1", "1")
    torchrun.finish()
    assert torchrun.done() == [f"w{rank} {rank} of 2 in attempt 2" for rank in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_node_is_lost_and_another_one_joins(torchrun: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """The survivor forms a group of one, and then one of two with the newcomer."""
    # Otherwise torch's agent of rank 0 tells newcomers no address of a store, and they wait for it (PyTorch 2.13).
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    where = f"localhost:{free_port()}"
    conf = "join_timeout=60,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"

    def start(node: str, *hosts: str) -> subprocess.Popen[bytes]:
        words = (*AGENT, "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "10", "--rdzv-id", "job")
        store = ("--rdzv-backend", "c10d", "--rdzv-endpoint", where, "--rdzv-conf", ",".join((conf, *hosts)))
        return torchrun.start(*words, *store, str(PROGRAMS / "elastic_program.py"), str(torchrun.folder), node)

    def wait_for(what: str) -> int:
        eventually((torchrun.folder / what).exists, timeout=60)
        return int((torchrun.folder / what).read_text())

    start("kept", "is_host=1")
    second = start("killed", "is_host=0")
    wait_for("first-kept")
    torchrun.kill(second, wait_for("first-killed"))
    wait_for("lost")
    wait_for("alone")
    start("new", "is_host=0")
    torchrun.finish()
    assert sorted(line.split(" on ")[1] for line in torchrun.done()) == ["kept", "new"]
    assert sorted(line.split(" on ")[0] for line in torchrun.done()) == ["w0 of 2", "w1 of 2"]
