"""Programs that exit while daemon threads or handlers are in Telegrad."""

import subprocess
import sys
from pathlib import Path

import pytest
from exiting_program import DURING_THE_END, LEFT_BEHIND, ROUNDS

PROGRAM = Path(__file__).with_name("exiting_program.py")
TIMEOUT = 300.0  # s


def assert_clean_exits(count: int, *cases: str) -> None:
    command = [sys.executable, str(PROGRAM), str(count), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert done.stdout == "{}\n", f"children by case and exit status: {done.stdout}{done.stderr[-4000:]}"


def test_a_few_exits() -> None:
    assert_clean_exits(3, "calls", "calls during the end", "passes", "handlers", "callbacks")


CALLING = """
import threading, time
from telegrad import rpc
from telegrad.testing.clusters import HashStore

def use():
    started.set()
    {use}

started = threading.Event()
rpc.init_rpc("w0", rank=0, world_size=1, store=HashStore())
threading.Thread(target=use, daemon=True).start()
started.wait()
time.sleep(0.1)
"""
USES = {
    "call": 'rpc.rpc_sync("w0", time.sleep, (3,))',
    "future": 'rpc.rpc_async("w0", time.sleep, (3,)).wait()',
    "reference": 'rpc.remote("w0", time.sleep, (3,)).to_here()',
    "stream": 'list(rpc.stream("w0", lambda: (yield time.sleep(3))))',
    "map": 'list(rpc.map("w0", time.sleep, [3]))',
}


QUICK = ("call", "stream")


@pytest.mark.parametrize("use", [use if use in QUICK else pytest.param(use, marks=pytest.mark.slow) for use in USES])
def test_a_daemon_thread_in_a_call_prints_nothing(use: str) -> None:
    program = CALLING.replace("{use}", USES[use])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert "NotInitialized" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("what", [*ROUNDS, *LEFT_BEHIND, *DURING_THE_END])
def test_many_exits(what: str) -> None:
    assert_clean_exits(60, what)
