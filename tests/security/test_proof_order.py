"""A worker with a secret gives no information to a peer without a proof."""

import struct
from collections.abc import Iterator

import pytest
from raw_peer_helpers import ANSWER, CHALLENGE, CONFIRM, HELLO, PROOF, REFUSE, WELCOME, RawPeer, frame, member, text

from telegrad.rpc import Options
from telegrad.testing import Cluster, cluster, eventually

pytestmark = pytest.mark.openssl

SECRET = "correct horse battery staple"
NONCE = 4 + 32  # bytes of a text
ONE_WORD = text("refused") + bytes(5)


@pytest.fixture(scope="module")
def group() -> Iterator[Cluster]:
    """Workers without encryption, so that each byte of the handshake is seen."""
    options = Options(secret=SECRET, encryption="off", transports=("unix", "tcp"), handshake_timeout=0.3)
    with cluster(2, options) as workers:
        yield workers


@pytest.fixture(params=["unix", "tcp"])
def peer(group: Cluster, request: pytest.FixtureRequest) -> Iterator[RawPeer]:
    with RawPeer(group[1], request.param) as raw:
        yield raw
    assert group[0].rpc_sync("w1", abs, (-1,)) == 1
    eventually(lambda: group[1]._worker.engine.stats()["connections"] == 1)


def facts_of(peer: RawPeer) -> list[bytes]:
    """Return what a peer without the secret must not learn."""
    core = peer.core
    return [core.info.name.encode(), core.group.token.encode(), struct.pack("<Q", core.incarnation), core.group.secret]


def test_a_peer_that_sends_nothing_gets_nothing(peer: RawPeer) -> None:
    assert peer.ended() == []


def test_a_peer_that_says_hello_gets_a_nonce(peer: RawPeer, group: Cluster) -> None:
    """The nonce is fresh, so it is no function of the secret and the hello."""
    hello = peer.hello(member(7, "new"))
    transport = "unix" if peer.socket.family.name == "AF_UNIX" else "tcp"
    with RawPeer(group[1], transport) as other:
        for each in (peer, other):
            each.send(frame(HELLO, hello))
        received = [each.ended() for each in (peer, other)]  # until the handshake takes too long
    for ((kind, challenge),) in received:
        assert (kind, len(challenge)) == (CHALLENGE, NONCE)
        assert not any(fact in challenge for fact in facts_of(peer))
    assert received[0] != received[1]


@pytest.mark.parametrize("secret", [b"guessed" * 4, b"\0"], ids=["wrong", "short"])
def test_a_peer_with_a_wrong_proof_gets_one_word(peer: RawPeer, secret: bytes) -> None:
    hello = peer.hello(member(7, "new"))
    peer.send(frame(HELLO, hello))
    kind, challenge = peer.receive()
    assert (kind, len(challenge)) == (CHALLENGE, NONCE)
    peer.send(frame(PROOF, peer.mac(b"initiator", text(hello) + challenge, secret)))
    assert peer.ended() == [(REFUSE, ONE_WORD)]


@pytest.mark.parametrize("kind", [ANSWER, CONFIRM, WELCOME])
def test_a_peer_cannot_leave_its_proof_out(peer: RawPeer, kind: int) -> None:
    peer.send(frame(HELLO, peer.hello(member(7, "new"))))
    assert peer.receive()[0] == CHALLENGE
    peer.send(frame(kind, bytes(NONCE)))
    assert peer.ended() in ([(REFUSE, ONE_WORD)], [])


def test_a_peer_with_the_secret_gets_the_proof_of_the_worker(peer: RawPeer) -> None:
    """Only now does the worker answer with its own proof."""
    hello = peer.hello(member(7, "proven"))
    peer.send(frame(HELLO, hello))
    challenge = peer.receive()[1]
    peer.send(frame(PROOF, peer.proof(hello, challenge)))
    kind, answer = peer.receive()
    assert (kind, len(answer) > NONCE) == (ANSWER, True)
    peer.send(frame(CONFIRM, peer.confirmation(hello, challenge, answer)))
    assert peer.receive()[0] == WELCOME
