"""Two connected network namespaces, and their end."""

import os
import subprocess

import pytest

from bench import baseline
from bench.networks import ADDRESSES, cable, missing
from bench.rows.networks import within

MB = 1 << 20

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def test_a_shaped_cable_limits_the_rate() -> None:
    with cable(gigabits=1) as (near, far):
        assert (near.address, far.address) == ADDRESSES
        with subprocess.Popen(within(far, baseline.program(), "serve", far.address), stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            seconds = baseline.measure("send", far.address, port, 16 * MB, 0.1, prefix=within(near))
        assert min(seconds) > 16 * MB * 8 / 1e9 * 0.9  # the first millisecond may be quicker


def test_namespaces_end_with_their_use() -> None:
    with cable() as places:
        pids = [place.namespace for place in places]
        own = os.readlink("/proc/self/ns/net")
        others = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
        assert len(others | {own}) == 3
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_the_missing_tool_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    reason = missing()
    assert reason is not None
    assert "ip is not installed" in reason
