"""The first calls of a process, in several threads at once."""

import subprocess
import sys
from pathlib import Path

FIRST_CALLS = """
import threading
from engine_helpers import Native
from telegrad.wire.tags import Status

real, inside, go_on = threading.main_thread, threading.Event(), threading.Event()


def slow():
    # What the core asks once, at a process's first call: the first to ask waits until another thread has made a call.
    if not inside.is_set():
        inside.set()
        assert go_on.wait(60)
    return real()


threading.main_thread = slow
one = Native(1)
completions = []
first = threading.Thread(target=lambda: completions.append(one.call(7)))
first.start()
assert inside.wait(60)
completions.append(one.call(7))
go_on.set()
first.join()
assert [completion[0] for completion in completions] == [Status.UNREACHABLE] * 2
one.stop()
print("done")
"""


def test_two_threads_make_their_first_calls_at_once() -> None:
    program = subprocess.run(
        [sys.executable, "-c", FIRST_CALLS],
        cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert program.stdout == "done\n", program.stderr
