"""`_core.thread_frames`: the frames of all threads."""

import gc
import sys
import threading
from types import FrameType

import pytest

from telegrad import _core
from telegrad.testing import Gate

DEPTH = 100


def descend(depth: int, gate: Gate) -> None:
    if depth:
        descend(depth - 1, gate)
    else:
        gate.enter()


def codes(frame: FrameType | None) -> list[str]:
    found = []
    while frame is not None:
        found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collections never run between two bytecodes there")
def test_frames_are_created_without_a_collection() -> None:
    gate, collections = Gate(), list[str]()
    thread = threading.Thread(target=descend, args=(DEPTH, gate))
    thread.start()
    gate.wait_for()
    before = gc.get_threshold()
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    try:
        gc.set_threshold(1)
        count = len(collections)
        frames = _core.thread_frames()
        during = len(collections) - count
        found = codes(frames[thread.ident or 0])
        assert gc.isenabled()
        gc.disable()
        _core.thread_frames()
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.set_threshold(*before)
        gc.callbacks.pop()
        gate.open()
        thread.join()
    assert during == 0
    assert found.count("descend") == DEPTH + 1
