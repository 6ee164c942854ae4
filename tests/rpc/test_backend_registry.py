import enum
import pickle
from typing import Any

import pytest

from telegrad.rpc import backend_registry
from telegrad.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions


@pytest.fixture(autouse=True)
def restored_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_registry, "BackendType", backend_registry.BackendType)


def construct(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return ("options", args, kwargs)


def init(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return ("agent", args, kwargs)


def test_one_backend_is_registered() -> None:
    backend = backend_registry.BackendType.TENSORPIPE
    assert repr(backend) == "BackendType.TENSORPIPE"
    assert backend_registry.backend_registered("TENSORPIPE")
    assert not backend_registry.backend_registered("OTHER")
    options = backend_registry.construct_rpc_backend_options(backend, init_method="file:///x", _transports=["uv"])
    assert isinstance(options, TensorPipeRpcBackendOptions)
    assert (options.init_method, options.rpc_timeout, options.num_worker_threads) == ("file:///x", 60, 16)
    assert pickle.loads(pickle.dumps(backend)) is backend


def test_register_another_backend() -> None:
    before = backend_registry.BackendType.TENSORPIPE
    backend = backend_registry.register_backend("OTHER", construct, init)
    assert backend is backend_registry.BackendType["OTHER"] is backend_registry.BackendType.OTHER
    assert {member.name for member in backend_registry.BackendType} >= {"OTHER", "TENSORPIPE"}
    assert backend_registry.construct_rpc_backend_options(backend, 1, "m", x=2) == ("options", (1, "m"), {"x": 2})
    assert backend_registry.init_backend(backend, store=1) == ("agent", (), {"store": 1})
    assert backend_registry.is_backend(backend)
    assert backend_registry.is_backend(before)  # though the enumeration has been replaced
    with pytest.raises(RuntimeError, match=r"^RPC backend .+: already registered$"):
        backend_registry.register_backend("OTHER", construct, init)


def test_values_that_are_no_backend_raise() -> None:
    class Other(enum.Enum):
        TENSORPIPE = 1

    for unknown in ("TENSORPIPE", Other.TENSORPIPE, None, 5):
        assert not backend_registry.is_backend(unknown)


def test_wrong_arguments_raise_before_anything_starts() -> None:
    from torch.distributed import HashStore

    backend = backend_registry.BackendType.TENSORPIPE
    with pytest.raises(TypeError, match="`store` must be a c10d::Store"):
        backend_registry.init_backend(backend, store=5, name="w", rank=0, world_size=1, rpc_backend_options=None)
    with pytest.raises(TypeError, match="`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`"):
        backend_registry.init_backend(
            backend, store=HashStore(), name="w", rank=0, world_size=1, rpc_backend_options=RpcBackendOptions()
        )
