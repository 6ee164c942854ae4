"""`RpcTimeout.state`: how far a call had come when its timeout expired."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from raw_peer_helpers import CALL_STATE, CANCEL, REPLY, REQUEST, WELCOME, RawPeer, frame, member, reachable

from telegrad.errors import RpcTimeout
from telegrad.rpc import Options
from telegrad.testing import Gate, cluster
from telegrad.wire import Tag

PEER = 7
REPLIED = 4  # CallState


@pytest.fixture
def peer() -> Iterator[RawPeer]:
    with cluster(1, reachable()) as group, RawPeer(group[0], "tcp") as raw:
        assert raw.join(member(PEER, "raw")) == WELCOME
        raw.send(frame(REQUEST, b"nonsense", tag=Tag.CALL, call=1))
        while raw.receive_call()[:2] != (REPLY, 1):  # the worker replies once it has the connection
            pass
        yield raw


@pytest.mark.parametrize("how", ["late reply", "state"])
def test_a_lost_or_late_reply(peer: RawPeer, how: str) -> None:
    def answer() -> None:
        late = {"late reply": (REPLY, int(Tag.VALUE)), "state": (CALL_STATE, REPLIED)}
        kind, tag = late[how]
        call = 0
        with contextlib.suppress(EOFError):
            while True:
                received = peer.receive_call()
                if received[0] == REQUEST:
                    call = received[1]
                elif received[:2] == (CANCEL, call):
                    peer.send(frame(kind, tag=tag, call=call))

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        states: list[str] = []
        while not states or (states[-1] == "unknown" and len(states) < 20):  # this machine needed more than 20 ms
            with pytest.raises(RpcTimeout) as caught:
                peer.core.start_internal(PEER, abs, (1,), 0.05).wait()
            states.append(caught.value.state)
    finally:
        peer.socket.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert states[-1] == "reply lost"
    assert "reply lost" in str(caught.value)


def test_a_call_that_waits_for_room_is_not_sent() -> None:
    gate = Gate()
    window = 1 << 16
    with cluster(2, Options(num_worker_threads=1, request_window_bytes=window)) as group:
        first = group[0].rpc_async("w1", gate.enter)
        gate.wait_for()
        second = group[0].rpc_async("w1", len, (bytes(window),))
        for wait in (group[0].rpc_sync, lambda *args, **kwargs: group[0].rpc_async(*args, **kwargs).wait()):
            with pytest.raises(RpcTimeout, match="waiting") as caught:
                wait("w1", len, (bytes(window),), timeout=0.05)
            assert caught.value.state == "waiting"
        gate.open()
        first.wait()
        assert second.wait() == window
