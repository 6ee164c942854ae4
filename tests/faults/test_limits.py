"""A worker without descriptors or memory: clear errors, and it recovers."""

import os
import resource
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from fault_helpers import check_clean, loss, shut_down
from free_ports import free_port
from process_helpers import TIMEOUT, Actor, actors, call_many, failure, state

from telegrad import rpc
from telegrad.rpc import Options

LIMIT = 256  # descriptors
FEW = 64  # descriptors
CALLERS = 22
MIB = 1 << 20
MEMORY = 128 * MIB
FILES = 4 * MIB


@pytest.fixture(params=["shm", *(pytest.param(each, marks=pytest.mark.slow) for each in ("unix", "tcp"))])
def three(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Actor]]:
    with actors(3, tmp_path, transports=(request.param,), connect_timeout=2.0, rpc_timeout=0) as group:
        yield group


# ---- steps


def take_descriptors() -> int:
    """Open files until there is no descriptor left."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    taken: list[int] = []
    state["taken"] = taken
    while True:
        try:
            taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            return len(taken)


def return_descriptors() -> None:
    for fd in state.pop("taken"):
        os.close(fd)


def call(to: str) -> int:
    return int(rpc.rpc_sync(to, abs, (-5,), timeout=0))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def allow_few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def allow_small_files() -> None:
    """Limit files, and with them shared memory, which is refused beyond that."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def transfer(to: str) -> int:
    """Send tensors larger than files may be; return the number of correct results."""
    tensors = [torch.full((4 * FILES,), number, dtype=torch.uint8) for number in range(5)]
    return sum(torch.equal(rpc.rpc_sync(to, torch.neg, (each,), timeout=0), -each) for each in tensors)


def shared_bytes() -> int:
    return int(rpc.debug_info().limits["shared_memory_bytes"].used)


def push(to: str) -> int:
    return int(rpc.rpc_sync(to, torch.numel, (torch.zeros(3 * MEMORY, dtype=torch.uint8),), timeout=0))


def enter(group: str) -> None:
    """Move this process into a control group."""
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))


def join_dynamic(name: str, where: str) -> None:
    rpc.init_rpc(name, rpc_backend_options=Options(init_method=where, rpc_timeout=TIMEOUT))


def join_with_callers(where: str) -> None:
    """Join with many workers of this process."""
    options = Options(init_method=where, rpc_timeout=TIMEOUT)
    state["callers"] = [rpc.Worker(f"caller{number}", options=options) for number in range(CALLERS)]


def call_from_each(to: str) -> list[int]:
    return [caller.rpc_sync(to, abs, (-number,)) for number, caller in enumerate(state["callers"])]


def leave_with_callers() -> None:
    for caller in state.pop("callers"):
        caller.shutdown(timeout=TIMEOUT)


# ---- descriptors


def test_a_caller_without_descriptors(three: list[Actor]) -> None:
    """Its open connections serve on; a new one fails until there are descriptors."""
    caller, known, other = three
    assert caller.do(call_many, "w1", 2) == known.do(call_many, "w0", 2) == 2
    assert caller.do(take_descriptors) > 0
    assert caller.do(call_many, "w1", 100) == known.do(call_many, "w0", 100) == 100
    kind, text = caller.do(failure, call, "w2")
    assert kind == "WorkerLost"
    assert "Too many open files" in text
    caller.do(return_descriptors)
    assert caller.do(call, "w2") == 5
    assert other.do(call, "w0") == 5
    check_clean(*three)
    shut_down(*three)


def test_a_callee_without_descriptors(three: list[Actor]) -> None:
    """A caller that cannot be accepted gets an error in bounded time."""
    caller, callee, known = three
    assert known.do(call_many, "w1", 2) == 2
    callee.do(take_descriptors)
    assert known.do(call_many, "w1", 100) == 100
    kind, _ = caller.do(failure, call, "w1")
    assert kind == "WorkerLost"
    callee.do(return_descriptors)
    assert caller.do(call, "w1") == 5
    assert callee.do(descriptors) < LIMIT / 2
    check_clean(*three)
    shut_down(*three)


def test_a_callee_with_few_descriptors_serves_many_callers(tmp_path: Path) -> None:
    with actors(2, tmp_path, method="none") as (callers, callee):
        where = f"tcp://127.0.0.1:{free_port()}"
        callers.do(join_with_callers, where)  # this process hosts the store
        callee.do(allow_few_descriptors)
        callee.do(join_dynamic, "callee", where)
        for _ in range(3):
            assert callers.do(call_from_each, "callee") == list(range(CALLERS))
        assert CALLERS < callee.do(descriptors) < FEW
        callee.do(rpc.shutdown)
        callers.do(leave_with_callers)
        assert callers.leave() == callee.leave() == 0


# ---- files


def test_workers_that_may_not_write_large_files(three: list[Actor]) -> None:
    """Large tensors travel as bytes in both directions."""
    first, second, third = three
    for actor in (first, second):
        actor.do(allow_small_files)
    assert first.do(transfer, "w1") == second.do(transfer, "w0") == 5
    assert first.do(transfer, "w2") == third.do(transfer, "w0") == 5
    assert max(first.do(shared_bytes), second.do(shared_bytes)) <= FILES
    check_clean(*three)
    shut_down(*three)


# ---- memory


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """Create a control group whose processes are killed beyond a number of bytes.

    Raises:
        OSError: This machine does not allow it.
    """
    root = Path("/sys/fs/cgroup")
    old = (root / "memory" / "memory.limit_in_bytes").exists()
    if not old:
        (root / "cgroup.subtree_control").write_text("+memory")
    group = (root / "memory" if old else root) / f"telegrad-{uuid.uuid4().hex}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))
        swap, most = ("memory.memsw.limit_in_bytes", limit) if old else ("memory.swap.max", 0)
        if (group / swap).exists():
            (group / swap).write_text(str(most))
        yield group
    finally:
        group.rmdir()


def is_enforced(group: Path) -> bool:
    """Return whether a process that takes too much memory is killed."""
    program = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); x = b'x' * {2 * MEMORY}"
    done = subprocess.run([sys.executable, "-S", "-E", "-c", program], stderr=subprocess.DEVNULL, check=False)
    return done.returncode == -signal.SIGKILL


@pytest.fixture
def narrow() -> Iterator[Path]:
    with ExitStack() as stack:
        try:
            group = stack.enter_context(memory_group(MEMORY))
        except OSError as e:
            pytest.skip(f"control groups cannot be made: {e}")
        if not is_enforced(group):
            pytest.skip("limits of control groups are not enforced")
        yield group


def test_a_callee_that_the_kernel_kills_for_its_memory(narrow: Path, tmp_path: Path) -> None:
    """Its caller lives, and has the loss of the callee as its error."""
    with actors(3, tmp_path, transports=("tcp",), rpc_timeout=0) as (caller, callee, other):
        assert caller.do(call_many, "w1", 2) == other.do(call_many, "w1", 2) == 2
        callee.do(enter, str(narrow))
        assert caller.do(loss, push, "w1") == "WorkerLost"
        callee.process.join(TIMEOUT)
        assert callee.process.exitcode == -signal.SIGKILL
        assert caller.do(call_many, "w2", 10) == other.do(call_many, "w0", 10) == 10
        check_clean(caller, other)
        shut_down(caller, other)
