"""Rank and world size of programs that specify neither."""

from collections.abc import Iterator
from typing import Any

import pytest
from free_ports import free_port

from telegrad import compat, rpc
from telegrad.rpc import Options


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Set the environment of the only worker of a launcher."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    yield monkeypatch
    rpc.shutdown(graceful=False)


def is_static() -> bool:
    worker: Any = rpc.api._get_current_rpc_agent().worker
    return bool(worker.static)


@pytest.mark.parametrize("options", [None, Options()])
def test_ranks_from_the_environment(launched: pytest.MonkeyPatch, options: Options | None) -> None:
    rpc.init_rpc("only", rpc_backend_options=options)
    assert is_static()
    assert rpc.get_worker_info().id == 0


@pytest.mark.parametrize("off", ["option", "variable", "rank", "torch", "drop-in"])
def test_ranks_not_from_the_environment(launched: pytest.MonkeyPatch, off: str) -> None:
    if off == "variable":
        launched.setenv("TELEGRAD_RANKS_FROM_ENVIRONMENT", "0")
    options: Any = None
    if off in ("option", "variable"):
        launched.setenv("WORLD_SIZE", "2")  # no worker waits for the other one
    if off == "option":
        options = Options(ranks_from_environment=False)
    elif off == "torch":
        options = rpc.TensorPipeRpcBackendOptions()
    if off == "drop-in":
        compat.install()
    try:
        rpc.init_rpc("only", rank=0 if off == "rank" else -1, rpc_backend_options=options)
    finally:
        compat.uninstall()
    assert not is_static()


def test_invalid_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_RANKS_FROM_ENVIRONMENT", "no")
    with pytest.raises(ValueError, match="TELEGRAD_RANKS_FROM_ENVIRONMENT should be 0 or 1, but is 'no'"):
        Options()


def test_invalid_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK=first and WORLD_SIZE=2 should be numbers"):
        rpc.init_rpc("only")
