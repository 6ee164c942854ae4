"""Calls that time out or are interrupted while they wait for the window.

Both ends count references in messages and requests in autograd contexts: such calls must leave both counts right.
"""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import RpcTimeout
from telegrad.options import Options
from telegrad.testing import Cluster, Gate, assert_quiescent, cluster
from telegrad.worker.calls.messages import Messages

SOON = 0.05  # s
WINDOW = 1 << 16  # bytes
LARGE = torch.ones(WINDOW // 4)

held: list[Any] = []


def hold() -> None:
    held[0].enter()


def size(x: Any, *_: Any) -> int:
    return int(x.numel())


@pytest.fixture
def group() -> Iterator[Cluster]:
    with cluster(3, Options(num_worker_threads=1, request_window_bytes=WINDOW)) as workers:
        yield workers
        for worker in workers:
            assert_quiescent(worker)


class FullWindow:
    """Context in which the window of w1 is full."""

    def __enter__(self) -> None:
        held[:] = [Gate()]
        held.append(rpc.rpc_async("w1", hold))
        held[0].wait_for()
        held.append(rpc.rpc_async("w1", size, (LARGE,)))

    def __exit__(self, *_: object) -> None:
        gate, *futures = held
        gate.open()
        for future in futures:
            future.wait()
        held.clear()


WAYS: dict[str, Callable[..., Any]] = {
    "sync": lambda to, *call: rpc.rpc_sync(to, *call, timeout=SOON),
    "async": lambda to, *call: rpc.rpc_async(to, *call, timeout=SOON).wait(),
    "multicast": lambda to, *call: [future.wait() for future in rpc.multicast((to, to), *call, timeout=SOON)],
}
way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@way
def test_references(group: Cluster, way: Any) -> None:
    rref = rpc.remote("w2", torch.ones, (3,))
    assert rref.to_here().sum() == 3
    with FullWindow(), pytest.raises(RpcTimeout):
        way("w1", size, (LARGE, rref))
    del rref
    for worker in group:
        assert_quiescent(worker)


@way
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "pickled"])
def test_autograd_contexts(group: Cluster, way: Any, plain: bool) -> None:
    x = LARGE.clone().requires_grad_()
    with autograd.context():
        assert rpc.rpc_sync("w1", size, (x,)) == len(x)
        with FullWindow(), pytest.raises(RpcTimeout):
            way("w1", size, (x,) if plain else (x, {"a set"}))
    for worker in group:
        assert_quiescent(worker)


class Stop(BaseException):
    """Exception that the signal handler raises."""


INTERRUPTED: dict[str, Callable[[rpc.RRef[Any]], Any]] = {
    "multicast": lambda rref: rpc.multicast(("w1", "w1", "w1"), size, (LARGE, rref)),
    "creation": lambda _: rpc.remote("w1", size, (LARGE,)),  # the owner runs it, so its value has to be released
}


@pytest.mark.parametrize("begin", INTERRUPTED.values(), ids=INTERRUPTED)
def test_a_signal(group: Cluster, begin: Callable[[rpc.RRef[Any]], Any]) -> None:
    def stop(*_: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    rref = rpc.remote("w2", torch.ones, (3,))
    try:
        with FullWindow():
            signal.setitimer(signal.ITIMER_REAL, SOON)
            with pytest.raises(Stop):
                begin(rref)
    finally:
        signal.signal(signal.SIGALRM, before)
    del rref


@pytest.mark.parametrize("count", [1, 2])
def test_a_signal_before_anything_is_sent(group: Cluster, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The signal arrives when the first requests have been encoded."""
    encode = Messages.encode_for_peer
    encoded: list[Any] = []

    def interrupted(self: Messages, *args: Any) -> Any:
        if len(encoded) == count:
            raise Stop
        encoded.append(encode(self, *args))
        return encoded[-1]

    rref = rpc.remote("w2", torch.ones, (3,))
    x = torch.ones(2, requires_grad=True)
    with autograd.context(), monkeypatch.context() as patched:
        patched.setattr(Messages, "encode_for_peer", interrupted)
        with pytest.raises(Stop):
            rpc.multicast(("w1", "w2", "w1"), size, (x, rref))
    del rref
    assert len(encoded) == count
