"""Refusals of a core that is built without OpenSSL, and what works without it.

Skipped with OpenSSL. `tools/test_without_openssl.sh` makes the build.
"""

from pathlib import Path

import pytest
from engine_helpers import SECOND, Native

from telegrad import _core
from telegrad.rpc import Options
from telegrad.testing import cluster
from telegrad.wire.layout import EventKind
from telegrad.wire.tags import Status

pytestmark = pytest.mark.skipif(bool(_core.openssl_version()), reason="the core is built with OpenSSL")

WHY = "this build of Telegrad has no OpenSSL"


@pytest.mark.parametrize("encryption", ["auto", "off"])
@pytest.mark.parametrize("secret", ["correct horse battery staple", "0123456789abcdef" * 2], ids=["phrase", "random"])
def test_a_secret_is_refused(secret: str, encryption: str) -> None:
    with pytest.raises(RuntimeError, match=WHY), cluster(1, Options(secret=secret, encryption=encryption)):
        pass


def test_certificates_are_refused(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("w0.pem", "w0.key", "ca.pem")]
    for file in files:
        Path(file).write_text("-----BEGIN CERTIFICATE-----\n")
    options = Options(tls_cert=files[0], tls_key=files[1], tls_ca=files[2])
    with pytest.raises(RuntimeError, match=WHY), cluster(1, options):
        pass


def test_an_encrypted_address_is_neither_listened_on_nor_dialed() -> None:
    a = Native(0)
    with pytest.raises(OSError, match="this worker does not encrypt"):
        a.engine.listen("tls:127.0.0.1:0")
    a.meet(1, "tls:127.0.0.1:1")
    status, *why = a.call(1)
    assert status == Status.UNREACHABLE
    assert "this worker does not encrypt" in str(why)
    a.stop()


def test_a_connection_from_another_host_is_refused() -> None:
    """A worker that does not check users takes all peers for processes of other hosts."""
    a, b = Native(0, check_uid=False), Native(1, connect_timeout=SECOND)
    b.meet(0, a.address)
    b.start(0, "target")
    a.wait_for(lambda: any(kind == EventKind.LOG and WHY in text for kind, text in a.events))
    a.stop()
    b.stop()


def test_a_worker_on_another_host_is_not_called() -> None:
    a, b = Native(0), Native(1, check_uid=False)
    b.meet(0, a.address)
    assert WHY in str(b.call(0))
    a.stop()
    b.stop()


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_a_group_of_one_user_on_one_host_works(transport: str) -> None:
    with cluster(2, Options(transports=(transport,))) as w:
        assert w[0].rpc_sync("w1", abs, (-1,)) == 1
