"""Several workers of one process that meet at an address, as those of several processes do."""

from pathlib import Path

import pytest
from actors import free_port

from telegrad.errors import TelegradError
from telegrad.rpc import Options, Worker
from telegrad.rpc.parts import _Numbers
from telegrad.testing import run_all


@pytest.mark.parametrize("scheme", ["tcp", "file", "env"])
def test_workers_of_one_process_meet(tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for turn in range(2):
        port = free_port()  # another rank hosts the store: guests might still find the one before at its port
        monkeypatch.setenv("MASTER_PORT", str(port))
        where = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/meeting", "env": "env://"}[scheme]
        options = Options(init_method=where, rpc_timeout=30)
        workers = run_all(
            [lambda rank=rank: Worker(f"w{rank}", (rank + turn) % 3, 3, options) for rank in range(3)]  # type: ignore[misc] # noqa: B023
        )
        assert workers[0].rpc_sync("w2", abs, (-1,)) == 1
        run_all([lambda worker=worker: worker.shutdown(timeout=30) for worker in workers])  # type: ignore[misc]


def test_a_rank_that_two_of_them_want(tmp_path: Path) -> None:
    """The second one is of the next group, to which nobody else comes."""
    options = Options(init_method=f"file://{tmp_path}/meeting", rpc_timeout=0.3)

    def join() -> None:
        with pytest.raises(TelegradError, match=r"rank 1 of 2 did not come"):
            Worker("w", 0, 2, options)

    run_all([join, join])


def test_numbers_of_groups() -> None:
    numbers = _Numbers()
    with numbers.joining("here", 2, 0) as first, numbers.joining("here", 2, 1) as same:
        assert first == same == 0
        with numbers.joining("here", 2, 1) as again, numbers.joining("there", 2, 1) as elsewhere:
            assert (again, elsewhere) == (1, 2)
    with numbers.joining("here", 2, 1) as following:
        assert following == 3
