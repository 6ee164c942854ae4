"""Wires between two workers, and certificates."""

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from telegrad.rpc import Options, Worker

SECRET = "correct horse battery staple"
ENCRYPTED = Options(secret=SECRET, transports=("tcp",), connect_timeout=5)


def address_of(worker: Worker) -> tuple[str, str, int]:
    """Return scheme, host and port of the only address of a worker."""
    (address,) = worker._worker.member.addresses
    scheme, host, port = address.split(":")
    return scheme, host, int(port)


class Wire:
    """Proxy between two workers, in the hands of an attacker.

    Args:
        to: The worker at its end.
    """

    def __init__(self, to: Worker) -> None:
        self.scheme, *self._to = address_of(to)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.recorded: list[bytes] = []  # what the dialing worker has sent
        self.flip = False  # change one byte of the next part
        self.cut_after: int | None = None  # bytes of the next part to pass on before the end
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def lead(self, worker: Worker, to: Worker) -> None:
        """Have a worker dial another through this wire."""
        core = to._worker
        address = f"{self.scheme}:127.0.0.1:{self.port}"
        worker._worker.engine.set_peer(core.info.id, core.info.name, core.incarnation, [address])

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._threads[0].join()
        _end(*self._sockets)
        for thread in self._threads[1:]:
            thread.join()
        for one in self._sockets:
            one.close()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.create_connection((self._to[0], self._to[1]))
            self._sockets += [near, far]
            for source, target, onward in ((near, far, True), (far, near, False)):
                self._threads.append(threading.Thread(target=self._carry, args=(source, target, onward)))
                self._threads[-1].start()

    def _carry(self, source: socket.socket, target: socket.socket, onward: bool) -> None:
        try:
            while part := source.recv(1 << 16):
                if onward:
                    self.recorded.append(part)
                    part = self._attack(part)
                target.sendall(part)
                if onward and self.cut_after is not None:
                    break
        except OSError:
            pass
        _end(source, target)

    def _attack(self, part: bytes) -> bytes:
        if self.cut_after is not None:
            return part[: self.cut_after]
        if not self.flip:
            return part
        self.flip = False
        middle = len(part) // 2
        return part[:middle] + bytes([part[middle] ^ 1]) + part[middle + 1 :]


def _end(*sockets: socket.socket) -> None:
    for one in sockets:
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


@contextmanager
def wire(dialing: Worker, to: Worker) -> Iterator[Wire]:
    """Put a wire between two workers that are not connected yet."""
    between = Wire(to)
    try:
        between.lead(dialing, to)
        yield between
    finally:
        between.close()


class Authority:
    """Certificate authority in a folder, made with the program openssl."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._name = folder, name
        self._openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                      "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")  # fmt: skip

    def options(self, worker: str, **more: object) -> Options:
        """Issue the certificate of a worker, and return options with it."""
        name = f"{self._name}-{worker}"
        self._openssl("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                      "-subj", f"/CN={worker}", "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        self._openssl("x509", "-req", "-days", "2", "-in", f"{name}.csr", "-CA", f"{self._name}.pem",
                      "-CAkey", f"{self._name}.key", "-CAcreateserial", "-out", f"{name}.pem")  # fmt: skip
        files = {"tls_cert": f"{name}.pem", "tls_key": f"{name}.key", "tls_ca": f"{self._name}.pem"}
        paths = {option: str(self._folder / file) for option, file in files.items()}
        return Options(transports=("tcp",), connect_timeout=5, **{**paths, **more})  # type: ignore[arg-type]

    def _openssl(self, *arguments: str) -> None:
        environment = {**os.environ, "OPENSSL_CONF": "/dev/null"}
        subprocess.run(
            ["openssl", *arguments], cwd=self._folder, env=environment, check=True, capture_output=True, timeout=30
        )
