"""Invalid bytes on the TCP port and the Unix socket close only their connection."""

import logging
import os
import pickle
import random
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
from raw_peer_helpers import (
    ANSWER,
    CHALLENGE,
    GOODBYE,
    HELLO,
    ONEWAY,
    PROOF,
    REFUSE,
    REPLY,
    REQUEST,
    VERSION,
    WELCOME,
    Bomb,
    RawPeer,
    frame,
    member,
    reachable,
    text,
)

from telegrad.errors import SerializationError, TelegradError
from telegrad.rpc import Options
from telegrad.serialize.tensor_layout import make_codec
from telegrad.testing import Cluster, Gate, ResourceSnapshot, cluster, eventually
from telegrad.wire import BodyKind, Flag, Tag

pytestmark = pytest.mark.openssl

NEW_WORKER = (7, "new", 1)
ONE_WORD = text("refused") + bytes(5)  # all that an unauthenticated peer gets


@pytest.fixture(scope="module")
def w() -> Iterator[Cluster]:
    with cluster(3, reachable(handshake_timeout=0.3)) as workers:
        yield workers


@pytest.fixture(params=["tcp", "unix"])
def peer(w: Cluster, request: pytest.FixtureRequest) -> Iterator[RawPeer]:
    """Open an unauthenticated connection to w1, during calls of w0 and w2 to it."""
    gate = Gate()
    under_way = [w[rank].rpc_async("w1", gate.enter, (rank,)) for rank in (0, 2)]
    gate.wait_for(2)
    with RawPeer(w[1], request.param) as raw:
        yield raw
    gate.open()
    assert [call.wait() for call in under_way] == [0, 2]
    assert w[0].rpc_sync("w1", abs, (-3,)) == 3
    eventually(lambda: w[1]._worker.engine.stats()["connections"] == 2, what="w1 to have its friends' links only")


def assert_rejected(caplog: pytest.LogCaptureFixture, why: str) -> None:
    """Check that w1 logs the rejection exactly once."""
    eventually(lambda: any(why in r.getMessage() for r in caplog.records), what=f"{why!r} in the log")
    assert all(r.levelno == logging.WARNING for r in caplog.records)


def test_random_bytes(peer: RawPeer, caplog: pytest.LogCaptureFixture) -> None:
    peer.send(random.Random(1).randbytes(4096))
    assert peer.ended() == []
    assert_rejected(caplog, "not a Telegrad frame")


def test_messages_of_another_protocol(peer: RawPeer, caplog: pytest.LogCaptureFixture) -> None:
    peer.send(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: scanner\r\nAccept: */*\r\n\r\n")
    assert peer.ended() == []
    assert_rejected(caplog, "not a Telegrad frame")


@pytest.mark.parametrize(
    "fields",
    [{"size": 1 << 62}, {"size": 5000}, {"segments": (1 << 32) - 1}, {"segments": 1}, {"name_size": (1 << 32) - 1}],
    ids=str,
)
@pytest.mark.parametrize("kind", [HELLO, REQUEST])
def test_huge_sizes_before_the_handshake(
    peer: RawPeer, caplog: pytest.LogCaptureFixture, kind: int, fields: dict[str, int]
) -> None:
    peer.send(frame(kind, **fields))
    assert peer.ended() == []
    assert_rejected(caplog, "is over the limits")


def test_a_connection_without_bytes_is_not_logged(peer: RawPeer, caplog: pytest.LogCaptureFixture) -> None:
    peer.socket.close()
    eventually(lambda: peer.core.engine.stats()["connections"] == 2)
    assert not caplog.records


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_calls_next_to_many_unauthenticated_connections(transport: str) -> None:
    """Each connection is closed when its handshake takes too long, or at once."""
    with cluster(3, reachable(handshake_timeout=0.3)) as group:
        assert group[0].rpc_sync("w1", abs, (-1,)) == 1
        before = len(ResourceSnapshot.now().fds)
        crowd = [RawPeer(group[1], transport) for _ in range(150)]
        for number, raw in enumerate(crowd):
            raw.send([b"", b"GET / HTTP/1.1\r\n\r\n", frame(HELLO, bytes(20))][number % 3])
        for number in range(50):
            assert group[0].rpc_sync("w1", abs, (-number,)) == group[1].rpc_sync("w0", abs, (-number,)) == number
        for raw in crowd:
            raw.ended()
            raw.socket.close()
        eventually(lambda: group[1]._worker.engine.stats()["connections"] == 1)
        eventually(lambda: len(ResourceSnapshot.now().fds) <= before)


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_connection_closed_in_the_middle_of_a_frame(peer: RawPeer, caplog: pytest.LogCaptureFixture, cut: int) -> None:
    peer.send(frame(HELLO, peer.hello(NEW_WORKER))[:cut])
    peer.socket.shutdown(socket.SHUT_WR)
    assert peer.ended() == []
    assert_rejected(caplog, "the stream ended in the middle of a frame")


@pytest.mark.parametrize("sent", ["nothing", "half a frame", "a hello"])
def test_silence_in_the_handshake(peer: RawPeer, caplog: pytest.LogCaptureFixture, sent: str) -> None:
    hello = frame(HELLO, peer.hello(NEW_WORKER))
    peer.send({"nothing": b"", "half a frame": hello[:70], "a hello": hello}[sent])
    assert [kind for kind, _ in peer.ended()] == ([CHALLENGE] if sent == "a hello" else [])
    assert_rejected(caplog, "the handshake took too long")


def test_wrong_secret(peer: RawPeer, caplog: pytest.LogCaptureFixture) -> None:
    assert peer.join(NEW_WORKER, secret=b"guessed") == REFUSE
    assert peer.ended() == []
    assert_rejected(caplog, "the group's secret does not match")


def test_another_group(peer: RawPeer, caplog: pytest.LogCaptureFixture) -> None:
    peer.send(frame(HELLO, peer.hello(NEW_WORKER, group="other group")))
    ((kind, why),) = peer.ended()
    assert (kind, why) == (REFUSE, ONE_WORD)
    assert_rejected(caplog, "belongs to another group")


def test_another_version(peer: RawPeer, caplog: pytest.LogCaptureFixture) -> None:
    peer.send(frame(HELLO, struct.pack("<I", 999) + peer.hello(NEW_WORKER)[4:]))
    ((kind, why),) = peer.ended()
    assert (kind, why) == (REFUSE, ONE_WORD)
    assert_rejected(caplog, f"protocol version 999 is not {VERSION}: run one version of telegrad on all workers")


def test_a_replayed_handshake_is_rejected(peer: RawPeer, caplog: pytest.LogCaptureFixture) -> None:
    transport = "unix" if peer.socket.family == socket.AF_UNIX else "tcp"
    me = member(7, "recorded")
    hello = peer.hello(me)
    peer.send(frame(HELLO, hello))
    challenge = peer.receive()[1]
    assert len(challenge) == 4 + 32  # a nonce: the acceptor has neither proven nor named itself
    proof = peer.proof(hello, challenge)
    peer.send(frame(PROOF, proof))
    assert peer.receive()[0] == ANSWER
    again = RawPeer.__new__(RawPeer)
    worker = type("Target", (), {"_worker": peer.core})()
    again.__init__(worker, transport)  # type: ignore[misc]
    with again:
        again.send(frame(HELLO, hello))
        assert again.receive()[0] == CHALLENGE
        again.send(frame(PROOF, proof))
        assert again.ended() == [(REFUSE, ONE_WORD)]
    peer.socket.close()
    assert_rejected(caplog, "the group's secret does not match")


@pytest.mark.parametrize("after", ["at once", "after a hello"])
def test_nothing_is_unpickled_before_the_handshake(
    peer: RawPeer, caplog: pytest.LogCaptureFixture, tmp_path: Path, after: str
) -> None:
    bomb = pickle.dumps((Bomb(tmp_path / "exploded"), (), {}))
    assert len(bomb) < 4096
    if after == "after a hello":
        peer.send(frame(HELLO, peer.hello(NEW_WORKER)))
        assert peer.receive()[0] == CHALLENGE
    for kind, tag in ((REQUEST, Tag.CALL), (ONEWAY, Tag.REFERENCES), (REPLY, Tag.ERROR)):
        peer.send(frame(kind, bomb, tag=tag, flags=BodyKind.PICKLE, call=1))
    assert peer.ended() == []
    assert_rejected(caplog, "before it had proven its identity")
    assert not (tmp_path / "exploded").exists()


def test_the_bomb_works_after_the_handshake(w: Cluster, tmp_path: Path) -> None:
    """Members may run any code at each other, so the test above is not vacuous."""
    w[0].rpc_sync("w1", id, (Bomb(tmp_path / "exploded"),))
    assert (tmp_path / "exploded").exists()


def test_a_members_id_cannot_be_reused(peer: RawPeer, caplog: pytest.LogCaptureFixture) -> None:
    """The peer has the secret, but uses the id of another name."""
    assert peer.join(member(0, "impostor")) == REFUSE
    assert peer.ended() == []
    assert_rejected(caplog, "worker id 0 is taken by another name")


# ---- from a member


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (frame(REQUEST, size=1 << 60), "is over the limits"),
        (frame(REQUEST, b"\x93\x00garbage", tag=Tag.CALL, name_id=9), "a name that it never defined"),
        (frame(99), "unknown type 99"),
        (b"\x00" * 200, "not a Telegrad frame"),
    ],
    ids=["oversized", "name", "type", "zeros"],
)
def test_a_member_that_sends_invalid_frames_is_disconnected(
    w: Cluster, caplog: pytest.LogCaptureFixture, data: bytes, why: str
) -> None:
    with RawPeer(w[1], "tcp") as raw:
        assert raw.join(member(20, "broken")) == WELCOME
        raw.send(data)
        assert raw.ended() == []
        eventually(
            lambda: any("worker broken is lost" in r.getMessage() or why in r.getMessage() for r in caplog.records)
        )
    assert w[0].rpc_sync("w1", abs, (-3,)) == 3


@pytest.mark.parametrize(
    "body", [b"", b"\xff" * 40, pickle.dumps(1), b"\x80\x05garbage"], ids=["empty", "ff", "int", "cut"]
)
@pytest.mark.parametrize("kind", [BodyKind.CODEC, BodyKind.PICKLE, BodyKind.CUSTOM])
def test_a_body_that_cannot_be_decoded_gets_an_error_reply(w: Cluster, kind: BodyKind, body: bytes) -> None:
    with RawPeer(w[1], "unix") as raw:
        assert raw.join(member(21, "garbled")) == WELCOME
        raw.send(frame(REQUEST, body, tag=Tag.CALL, flags=kind, call=5))
        answer, reply = raw.receive()
        assert answer == REPLY
        assert b"Error" in reply
        raw.send(frame(GOODBYE))
    assert w[0].rpc_sync("w1", abs, (-3,)) == 3


@pytest.mark.parametrize(
    "metadata",
    [
        ((), None, None, "x", "y", None, None),
        ((), None, None, 2**70, 3, None, None),
        ((), None, None, 7, [], None, None),
        (5, None, None, None, None, None, None),
        ((), "x", None, None, None, None, None),
        ((), None, None, None, None, {"name": 5}, None),
        ((), None, None, None, None, "name", None),
        ((), None, None, None, None, None),
        [(), None],
    ],
    ids=["texts", "large number", "list", "no tickets", "target", "header", "headers", "short", "a list"],
)
def test_metadata_that_cannot_be_read_gets_an_error_reply(w: Cluster, metadata: object) -> None:
    codec = make_codec()
    (body, _), (trailer, _) = codec.encode(((), {})), codec.encode(metadata)
    with RawPeer(w[1], "unix") as raw:
        assert raw.join(member(22, "muddled")) == WELCOME
        for call in range(20):  # more than the worker has threads
            request = frame(REQUEST, tag=Tag.CALL, flags=Flag.METADATA, call=call + 1, segments=1, size=len(body))
            raw.send(request + struct.pack("<QQ", len(trailer), 0) + body + trailer)
            answer, reply = raw.receive()
            assert answer == REPLY
            assert b"Error" in reply
        raw.send(frame(GOODBYE))
    assert w[0].rpc_sync("w1", abs, (-3,)) == 3


# ---- limits


def test_message_over_the_header_limit_is_an_error_of_its_call() -> None:
    with cluster(2, Options(max_header_bytes=100_000)) as w:
        for big in ("x" * 200_000, [object] * 50_000):
            with pytest.raises(SerializationError, match=r"max_header_bytes"):
                w[0].rpc_sync("w1", len, (big,))
            with pytest.raises(SerializationError, match=r"max_header_bytes"):
                w[0].remote("w1", len, (big,)).to_here()
        assert w[0].rpc_sync("w1", len, ("x" * 90_000,)) == 90_000
        with pytest.raises(SerializationError, match=r"max_header_bytes"):
            w[0].rpc_sync("w1", str.__mul__, ("x", 200_000))
        assert w[0].rpc_sync("w1", str.__mul__, ("x", 3)) == "xxx"


def test_a_member_that_exceeds_the_limits_is_disconnected(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(2, reachable(), check=False, graceful=False) as w:
        with RawPeer(w[1], "tcp") as raw:
            assert raw.join(member(22, "large")) == WELCOME
            raw.send(frame(REQUEST, size=(256 << 20) + 1, tag=Tag.CALL))
            assert raw.ended() == []
        assert_rejected(caplog, "is over the limits")
        assert w[0].rpc_sync("w1", abs, (-1,)) == 1


# ---- users


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the user")
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_process_of_another_user_is_rejected_on_the_same_host(
    w: Cluster, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    """The worker rejects it before the handshake, though it knows the secret."""
    core = w[1]._worker
    address = next(a for a in core.member.addresses if a.startswith(f"{transport}:"))
    host, _, port = address.partition(":")[2].rpartition(":")
    program = (
        "import os, socket\n"
        "os.setgid(65534); os.setuid(65534)\n"
        + (
            f"s = socket.socket(socket.AF_UNIX)\ns.connect({chr(0) + address[6:]!r})\n"
            if transport == "unix"
            else f"s = socket.socket()\ns.connect(({host!r}, {port}))\n"
        )
        + "s.settimeout(20)\nassert s.recv(1) == b'', 'it was answered'\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert_rejected(
        caplog, "belongs to another user (uid 65534): workers of one host must run as the same user (here uid 0)"
    )
    assert not any("took too long" in r.getMessage() for r in caplog.records)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the user")
def test_connections_of_another_user_take_no_descriptor(w: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """The program can open files, and members connect, during hundreds of attempts."""
    core = w[1]._worker
    address = next(a for a in core.member.addresses if a.startswith("tcp:"))
    host, _, port = address.partition(":")[2].rpartition(":")
    program = (
        "import os, resource, socket, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (2000, 2000))\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "crowd = [socket.socket() for _ in range(800)]\n"
        f"for s in crowd: s.connect(({host!r}, {port}))\n"
        "print('there', flush=True)\n"
        "sys.stdin.read()\n"
    )
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    crowd = subprocess.Popen([sys.executable, "-S", "-E", "-c", program], stdin=PIPE, stdout=PIPE, text=True)
    assert crowd.stdin is not None
    assert crowd.stdout is not None
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        assert crowd.stdout.readline() == "there\n"
        for _ in range(50):
            with open(os.devnull):
                assert core.engine.stats()["connections"] == 2
            assert w[0].rpc_sync("w1", abs, (-3,)) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        crowd.stdin.close()
        crowd.stdout.close()
        assert crowd.wait(30) == 0
    assert_rejected(caplog, "belongs to another user (uid 65534)")


SECRET = "correct horse battery staple"


@pytest.mark.parametrize("theirs", ["another secret of theirs", None])
@pytest.mark.parametrize("given", ["option", "environment", "file"])
def test_worker_with_another_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, given: str, theirs: str | None
) -> None:
    from torch.distributed import HashStore

    from telegrad.rpc import Worker
    from telegrad.testing import run_all

    def options(secret: str | None) -> Options:
        if secret is None or given == "option":
            return Options(secret=secret, connect_timeout=5)
        if given == "environment":
            with monkeypatch.context() as inner:
                inner.setenv("TELEGRAD_SECRET", secret)
                return Options(connect_timeout=5)
        path = tmp_path / secret.replace(" ", "-")
        path.write_text(f"{secret}\n")
        return Options(secret_file=str(path), connect_timeout=5)

    store = HashStore()
    chosen = [options(SECRET), options(theirs), options(SECRET)]

    def join(rank: int) -> None:
        with pytest.raises(
            TelegradError, match=r"record of worker w1 \(rank 1\) .* was not made with the group's secret"
        ):
            Worker(f"w{rank}", rank, 3, chosen[rank], store=store)

    run_all([lambda rank=rank: join(rank) for rank in range(3)])  # type: ignore[misc]
    assert all(SECRET not in r.getMessage() for r in caplog.records)
