import enum
import pickle
from typing import Any

import pytest

from telegrad.rpc import backend_registry
from telegrad.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_registry, "BackendType", backend_registry.BackendType)


def construct(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return ("options", args, kwargs)


def init(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return ("agent", args, kwargs)


def test_there_is_one_to_begin_with() -> None:
    backend = backend_registry.BackendType.TENSORPIPE
    assert repr(backend) == "BackendType.TENSORPIPE"
    assert backend_registry.backend_registered("TENSORPIPE")
    assert not backend_registry.backend_registered("OTHER")
    options = backend_registry.construct_rpc_backend_options(backend, init_method="file:///x", _transports=["uv"])
    assert isinstance(options, TensorPipeRpcBackendOptions)
    assert (options.init_method, options.rpc_timeout, options.num_worker_threads) == ("file:///x", 60, 16)
    assert pickle.loads(pickle.dumps(backend)) is backend


def test_one_more() -> None:
    before = backend_registry.BackendType.TENSORPIPE
    backend = backend_registry.register_backend("OTHER", construct, init)
    assert backend is backend_registry.BackendType["OTHER"] is backend_registry.BackendType.OTHER
    assert {member.name for member in backend_registry.BackendType} >= {"OTHER", "TENSORPIPE"}
    assert backend_registry.construct_rpc_backend_options(backend, 1, "m", x=2) == ("options", (1, "m"), {"x": 2})
    assert backend_registry.init_backend(backend, store=1) == ("agent", (), {"store": 1})
    assert backend_registry.is_backend(backend)
    assert backend_registry.is_backend(before)  # though the enumeration is another one now
    with pytest.raises(RuntimeError, match=r"^RPC backend .+: already registered$"):
        backend_registry.register_backend("OTHER", construct, init)


def test_what_is_no_backend() -> None:
    class Other(enum.Enum):
        TENSORPIPE = 1

    for stranger in ("TENSORPIPE", Other.TENSORPIPE, None, 5):
        assert not backend_registry.is_backend(stranger)


def test_arguments_of_the_wrong_kind_are_refused_before_anything_is_started() -> None:
    from torch.distributed import HashStore

    backend = backend_registry.BackendType.TENSORPIPE
    with pytest.raises(TypeError, match="`store` must be a c10d::Store"):
        backend_registry.init_backend(backend, store=5, name="w", rank=0, world_size=1, rpc_backend_options=None)
    with pytest.raises(TypeError, match="`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`"):
        backend_registry.init_backend(
            backend, store=HashStore(), name="w", rank=0, world_size=1, rpc_backend_options=RpcBackendOptions()
        )
