"""Registry of the backends that ``init_rpc`` can start, by name.

Telegrad has one backend, under the name that programs ask for: ``TENSORPIPE``. Tests (the faulty agent) and programs
register others.
"""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from telegrad.rpc import constants
from telegrad.rpc.options import Options, TensorPipeRpcBackendOptions

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "is_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """Handlers of a member of `BackendType`.

    Example::

        backend = rpc.backend_registry.BackendType.TENSORPIPE
        options = backend.value.construct_rpc_backend_options_handler(30.0, "env://")
    """

    construct_rpc_backend_options_handler: Callable[..., object]
    init_backend_handler: Callable[..., object]


_backend_type_doc = "Registered backends; `register_backend` adds one."


def _backend_type_repr(member: enum.Enum) -> str:
    return f"BackendType.{member.name}"


def _make_enum(members: dict[str, BackendValue]) -> object:
    kind = enum.Enum("BackendType", members, module=__name__)  # type: ignore[misc]
    kind.__doc__ = _backend_type_doc
    kind.__repr__ = _backend_type_repr  # type: ignore[method-assign,assignment]
    return kind


BackendType: Any = _make_enum({})


def backend_registered(backend_name: str) -> bool:
    """Return whether a backend of this name is registered.

    Args:
        backend_name: the name.

    Example::

        assert rpc.backend_registry.backend_registered("TENSORPIPE")
    """
    return backend_name in BackendType.__members__


def is_backend(candidate: object) -> bool:
    """Return whether an object is a member of `BackendType`.

    Members of earlier versions of the enumeration, before more backends were registered, count as well.

    Args:
        candidate: any object.

    Example::

        assert rpc.backend_registry.is_backend(rpc.backend_registry.BackendType.TENSORPIPE)
    """
    known = getattr(candidate, "name", None)
    return (
        isinstance(candidate, enum.Enum)
        and isinstance(known, str)
        and backend_registered(known)
        and BackendType[known].value is candidate.value
    )


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., object],
    init_backend_handler: Callable[..., object],
) -> Any:
    """Add a backend.

    `BackendType` is a new enumeration afterwards. Members of the old one stay valid.

    Args:
        backend_name: name of the backend.
        construct_rpc_backend_options_handler: called with ``rpc_timeout``, ``init_method`` and the other arguments of
            `construct_rpc_backend_options`; returns the options.
        init_backend_handler: called with ``store``, ``name``, ``rank``, ``world_size`` and
            ``rpc_backend_options``; returns the agent.

    Returns:
        The new member of `BackendType`.

    Raises:
        RuntimeError: a backend of that name is registered already.

    Example::

        def make_options(rpc_timeout, init_method, **others):
            return rpc.Options(rpc_timeout=rpc_timeout, init_method=init_method)

        def start(store, name, rank, world_size, rpc_backend_options):
            print(f"{name} has rank {rank}")

        backend = rpc.backend_registry.register_backend("MINE", make_options, start)
    """
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _make_enum({backend_name: value} | {member.name: member.value for member in BackendType})
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: object,
) -> Any:
    """Create the options object of a backend.

    Args:
        backend: a member of `BackendType`.
        rpc_timeout: default timeout of calls, in seconds.
        init_method: address of the rendezvous.
        kwargs: further options of the backend.

    Returns:
        The options, for ``rpc_backend_options`` of `init_rpc`.

    Example::

        backend = rpc.backend_registry.BackendType.TENSORPIPE
        options = rpc.backend_registry.construct_rpc_backend_options(backend, rpc_timeout=30)
    """
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: object, **kwargs: object) -> Any:
    """Start a backend.

    Args:
        backend: a member of `BackendType`.
        args, kwargs: for the backend's handler: ``store``, ``name``, ``rank``, ``world_size`` and
            ``rpc_backend_options``.

    Returns:
        The agent that the handler returns.

    Example::

        registry = rpc.backend_registry
        backend = registry.register_backend("PRINTING", lambda *_, **__: None, lambda **about: about["name"])
        print(registry.init_backend(backend, name="worker0"))  # worker0
    """
    return backend.value.init_backend_handler(*args, **kwargs)


def _tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
    _transports: list[str] | None = None,
    _channels: list[str] | None = None,
    **_others: object,
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        _transports=_transports,
        _channels=_channels,
    )


def _tensorpipe_init_backend_handler(
    store: object, name: str, rank: int, world_size: int | None, rpc_backend_options: object
) -> object:
    from torch.distributed.distributed_c10d import Store

    if not isinstance(store, Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(rpc_backend_options, (TensorPipeRpcBackendOptions, Options)):
        raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}")
    from telegrad.rpc import api

    return api._start_agent(store, name, rank, world_size, rpc_backend_options)


register_backend("TENSORPIPE", _tensorpipe_construct_rpc_backend_options_handler, _tensorpipe_init_backend_handler)
