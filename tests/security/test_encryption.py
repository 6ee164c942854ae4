"""Encrypted TCP between workers, with attackers on the network."""

import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from encryption_helpers import ENCRYPTED, SECRET, Authority, address_of, wire
from torch.distributed import HashStore

from telegrad.errors import TelegradError, WorkerLost
from telegrad.rpc import Options, Worker
from telegrad.testing import Gate, cluster, eventually, run_all

pytestmark = pytest.mark.openssl
needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="the program openssl makes the certificates")

ONE_ALERT = b"\x15\x03\x03\x00\x02\x02\x28"  # handshake_failure
MARK = "a text that an observer would find"


received: list[int] = []


def receive(value: int) -> int:
    received.append(value)
    return value


def reversed_text(text: str) -> str:
    return text[::-1]


def test_with_a_secret_every_byte_on_tcp_is_encrypted() -> None:
    with cluster(2, ENCRYPTED, graceful=False, check=False) as w, wire(w[0], w[1]) as between:
        assert address_of(w[1])[0] == "tls"
        assert w[0].rpc_sync("w1", reversed_text, (MARK,)) == MARK[::-1]
        sent = b"".join(between.recorded)
        assert len(sent) > len(MARK)
        for plain in (MARK, "reversed_text", "TGR1", w[0]._worker.group.token):
            assert plain.encode() not in sent


def extensions_of(hello: bytes) -> dict[int, bytes]:
    """Return the extensions of a ClientHello by type; RFC 8446, section 4.1.2."""
    assert hello[0] == 22, "not a record of the handshake"
    at = 5 + 4 + 2 + 32  # the headers of record and message, the version, the random bytes
    at += 1 + hello[at]  # the session's id
    at += 2 + int.from_bytes(hello[at : at + 2], "big")  # the ciphers
    at += 1 + hello[at]  # the compression methods
    at += 2
    found = {}
    while at < len(hello):
        kind, size = (int.from_bytes(hello[at + i : at + i + 2], "big") for i in (0, 2))
        found[kind] = hello[at + 4 : at + 4 + size]
        at += 4 + size
    return found


def test_each_connection_has_keys_that_the_secret_does_not_give() -> None:
    """The only mode on offer adds a fresh Diffie-Hellman exchange: psk_dhe_ke."""
    key_share, exchange_modes, psk_dhe_ke = 51, 45, 1
    shares = set()
    for _ in range(2):
        with cluster(2, ENCRYPTED, graceful=False, check=False) as w, wire(w[0], w[1]) as between:
            assert w[0].rpc_sync("w1", reversed_text, (MARK,)) == MARK[::-1]
            found = extensions_of(between.recorded[0])
        assert found[exchange_modes] == bytes([1, psk_dhe_ke])
        shares.add(found[key_share])
    assert len(shares) == 2


def test_without_encryption_an_observer_reads_everything() -> None:
    """The test above is not vacuous, and the option works."""
    plain = Options(secret=SECRET, encryption="off", transports=("tcp",))
    with cluster(2, plain, graceful=False, check=False) as w, wire(w[0], w[1]) as between:
        assert address_of(w[1])[0] == "tcp"
        assert w[0].rpc_sync("w1", reversed_text, (MARK,)) == MARK[::-1]
        assert MARK.encode() in b"".join(between.recorded)


def test_a_group_without_a_given_secret_is_not_encrypted() -> None:
    with cluster(1, Options(transports=("tcp",))) as w:
        assert address_of(w[0])[0] == "tcp"


@pytest.mark.parametrize("megabytes", [1, 64])
def test_tensors_arrive_exactly(megabytes: int) -> None:
    with cluster(2, ENCRYPTED) as w:
        sent = torch.randint(256, (megabytes << 20,), dtype=torch.uint8)
        assert torch.equal(w[0].rpc_sync("w1", torch.bitwise_not, (sent,)), ~sent)


def test_lanes_are_encrypted_and_exact() -> None:
    with cluster(2, ENCRYPTED) as w:
        sent = torch.randint(256, (24 << 20,), dtype=torch.uint8)
        for _ in range(6):  # lanes are opened after large messages, and used in turn
            assert torch.equal(w[0].rpc_sync("w1", torch.clone, (sent,)), sent)
        eventually(lambda: w[0]._worker.engine.stats()["lanes"] == 3, what="lanes")
        for _ in range(4):
            assert torch.equal(w[0].rpc_sync("w1", torch.clone, (sent,)), sent)


def test_references_and_many_calls_at_once() -> None:
    with cluster(3, ENCRYPTED) as w:
        references = [w[0].remote(f"w{1 + i % 2}", torch.full, ((1000,), float(i))) for i in range(50)]
        assert [int(reference.to_here()[7]) for reference in references] == list(range(50))
        calls = [w[1].rpc_async("w2", abs, (-i,)) for i in range(2000)]
        assert [call.wait() for call in calls] == list(range(2000))


@pytest.mark.parametrize("attack", ["a flipped byte", "a cut record", "a cut in the header"])
def test_a_changed_byte_ends_the_session_without_data(attack: str) -> None:
    gate = Gate()
    options = replace(ENCRYPTED, heartbeat=0.5)  # what is cut is noticed by its silence
    with cluster(2, options, graceful=False, check=False) as w, wire(w[0], w[1]) as between:
        assert w[0].rpc_sync("w1", abs, (-1,)) == 1
        pending = w[0].rpc_async("w1", gate.enter, (1,))
        gate.wait_for(1)
        between.flip = attack == "a flipped byte"
        between.cut_after = {"a cut record": 40, "a cut in the header": 3}.get(attack)
        received.clear()
        with pytest.raises(WorkerLost, match="w1"):
            w[0].rpc_sync("w1", receive, (2,))
        with pytest.raises(WorkerLost, match="w1"):
            pending.wait()
        assert received == []
        gate.open()


def test_a_recorded_connection_cannot_be_replayed(caplog: pytest.LogCaptureFixture) -> None:
    received.clear()
    with cluster(2, ENCRYPTED, graceful=False, check=False) as w, wire(w[0], w[1]) as between:
        assert w[0].rpc_sync("w1", receive, (1,)) == 1
        recorded = b"".join(between.recorded)
        with socket.create_connection(address_of(w[1])[1:]) as attacker:
            attacker.sendall(recorded)
            attacker.settimeout(20)
            try:
                while attacker.recv(1 << 16):
                    pass
            except ConnectionResetError:
                pass
        eventually(lambda: "refused a connection" in caplog.text, what="the refusal in the log")
        assert received == [1]
        assert w[0].rpc_sync("w1", abs, (-1,)) == 1


@pytest.mark.parametrize(
    "greeting", [b"GET / HTTP/1.1\r\n\r\n", b"TGR1" + bytes(100), b"\x16\x03\x01\x00\x04\x55\x00\x00\x00"]
)
def test_an_unauthenticated_peer_gets_one_alert(caplog: pytest.LogCaptureFixture, greeting: bytes) -> None:
    with cluster(1, ENCRYPTED) as w, socket.create_connection(address_of(w[0])[1:]) as outsider:
        outsider.settimeout(20)
        outsider.sendall(greeting)
        assert outsider.recv(100) == ONE_ALERT
        assert outsider.recv(100) == b""
        eventually(lambda: "refused a connection" in caplog.text, what="the reason in the log")


def refused(caller: Worker, callee: str) -> str:
    with pytest.raises(TelegradError) as error:
        caller.rpc_sync(callee, abs, (-1,), timeout=30)
    return str(error.value)


@pytest.mark.parametrize(
    ("mine", "theirs", "dialed", "why"),
    [
        ("off", "auto", "tls", "is encrypted, but this worker does not encrypt"),
        ("auto", "off", "tcp", "is not encrypted, but this worker encrypts"),
        ("off", "auto", "tcp", "the other end encrypts, and this one does not"),
        ("auto", "off", "tls", "does not encrypt"),
    ],
)
def test_encryption_cannot_be_negotiated_away(mine: str, theirs: str, dialed: str, why: str) -> None:
    """Neither by another address, nor at the address of a worker without encryption."""
    near, far = (
        Options(secret=SECRET, encryption=each, transports=("tcp",), connect_timeout=1) for each in (mine, theirs)
    )
    with cluster(1, near, names="a{}") as a, cluster(1, far, names="b{}") as b:
        core, (_, host, port) = b[0]._worker, address_of(b[0])
        a[0]._worker.engine.set_peer(7, "b0", core.incarnation, [f"{dialed}:{host}:{port}"])
        status, *_, text, _ = a[0]._worker.engine.call(7, 1, 0, 0, None, b"", None, 20_000_000_000, False, None)
        assert status != 0
        assert why in text


def test_a_worker_with_another_secret_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    far = Options(secret="another horse battery staple", transports=("tcp",))
    with cluster(1, ENCRYPTED, names="a{}") as a, cluster(1, far, names="b{}") as b:
        core, (_, host, port) = b[0]._worker, address_of(b[0])
        a[0]._worker.engine.set_peer(7, "b0", core.incarnation, [f"tls:{host}:{port}"])
        status, *_, text, _ = a[0]._worker.engine.call(7, 1, 0, 0, None, b"", None, 20_000_000_000, False, None)
        assert status != 0
        assert "refused by the peer, which logs the reason: this worker has another secret" in text
        eventually(lambda: "the group's secret does not match" in caplog.text, what="the reason in the log of b0")


# ---- certificates


def joined(options: list[Options], names: list[str]) -> list[Worker]:
    """Start a static group, each worker with options of its own."""
    store = HashStore()
    return run_all(
        [
            lambda rank=rank: Worker(names[rank], rank, len(names), options[rank], store=store)  # type: ignore[misc]
            for rank in range(len(names))
        ]
    )


@needs_openssl
@pytest.mark.parametrize("secret", [None, SECRET])
def test_workers_with_certificates(tmp_path: Path, secret: str | None) -> None:
    authority = Authority(tmp_path)
    workers = joined([authority.options(name, secret=secret) for name in ("w0", "w1")], ["w0", "w1"])
    assert address_of(workers[1])[0] == "tls"
    sent = torch.arange(1 << 20)
    assert torch.equal(workers[0].rpc_sync("w1", torch.neg, (sent,)), -sent)
    assert workers[1].rpc_sync("w0", abs, (-1,)) == 1
    run_all([worker.shutdown for worker in workers])


@needs_openssl
def test_a_worker_with_the_certificate_of_another_is_refused(tmp_path: Path) -> None:
    """A member cannot take another member's name."""
    authority = Authority(tmp_path)
    options = [authority.options("w0"), authority.options("another")]
    workers = joined(options, ["w0", "w1"])
    assert "the certificate of worker w1 has another name" in refused(workers[0], "w1")
    assert "the certificate of worker w1 has another name" in refused(workers[1], "w0")
    run_all([lambda worker=worker: worker.shutdown(graceful=False) for worker in workers])  # type: ignore[misc]


@needs_openssl
def test_a_worker_with_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    options = [Authority(tmp_path, name).options(worker) for name, worker in (("one", "w0"), ("two", "w1"))]
    workers = joined(options, ["w0", "w1"])
    assert "the certificate of the other end is not accepted" in refused(workers[0], "w1")
    run_all([lambda worker=worker: worker.shutdown(graceful=False) for worker in workers])  # type: ignore[misc]


@needs_openssl
def test_certificates_that_cannot_be_read(tmp_path: Path) -> None:
    options = Authority(tmp_path).options("w0", tls_cert="/no/such/file")
    with pytest.raises(RuntimeError, match=r"cannot read the certificate /no/such/file \(option tls_cert\)"):
        Worker("w0", 0, 1, options, store=HashStore())
