"""Groups of processes that one competitor connects: start, result and end."""

import json
import os
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.competitors.base import HOST, Client, Competitor, Place, Seat
from bench.processes import adopt_orphans, descendants, end_descendants, fork, wait

SHOWN_OUTPUT = 1500  # characters of a failed process's output


class Failed(Exception):
    """A group failed. The text is for the table."""


def in_leader(body: Callable[[], object], seconds: float) -> None:
    """Run `body` in a separate process and end all processes that it started.

    Raises:
        Failed: it raised, or takes longer than `seconds`.
    """
    adopt_orphans()
    older = descendants(os.getpid())
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")

        def lead() -> None:
            adopt_orphans()
            body()

        pid = fork(lead, errors=output)
        try:
            status = wait(pid, seconds)
        finally:
            end_descendants(keep=older)
        if status is None:
            raise Failed(f"hung for {seconds:.0f} s")
        if status:
            text = output.read_text(errors="replace").strip()[-SHOWN_OUTPUT:] if output.exists() else ""
            raise Failed(text or f"ended with status {status}")


def group_body(
    competitor: Competitor, workers: int, main: Callable[[Client], object], places: tuple[Place, ...] = ()
) -> None:
    """Connect `workers` processes and run `main` in the first. For the group's leader."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        port = 29500 if places else free_port()
        seats = [Seat(rank, workers, port, Path(folder), places) for rank in range(workers)]
        competitor.run(seats, main)


def run_in_group(
    competitor: Competitor,
    workers: int,
    function: Callable[..., Any],
    *args: Any,
    places: tuple[Place, ...] = (),
    seconds: float = 120.0,
) -> Any:
    """Return the result, as JSON, of `function(client, *args)` in a fresh group.

    The function runs in worker 0 and must belong to a module.

    Raises:
        Failed: the group did not answer within `seconds`.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        main = partial(_answer, function, args, answer)
        try:
            in_leader(partial(group_body, competitor, workers, main, places), seconds)
        except Failed:
            if not answer.exists():
                raise  # else it only failed to end
        return json.loads(answer.read_text())


def _answer(function: Callable[..., Any], args: tuple[Any, ...], answer: Path, client: Client) -> None:
    text = json.dumps(function(client, *args))
    unfinished = answer.with_suffix(".part")
    unfinished.write_text(text)
    unfinished.rename(answer)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])
