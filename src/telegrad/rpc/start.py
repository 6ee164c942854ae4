"""Joining a group: ``init_rpc``."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from telegrad.autograd.service import Autograd
from telegrad.errors import TelegradError
from telegrad.group import addresses, device_maps, rendezvous, stores
from telegrad.group.attempts import Attempts
from telegrad.group.group_store import group_store_of
from telegrad.group.joining import join_at
from telegrad.group.log import GroupLog
from telegrad.group.reservation import reserve
from telegrad.group.secret import given_secret
from telegrad.group.store_parts import Part, join_open_part, prefix_of
from telegrad.group.store_waits import Store, StoreGone
from telegrad.options import Options, RpcBackendOptions, as_options
from telegrad.protocols.leases import Timing
from telegrad.protocols.membership import MembershipError
from telegrad.rpc import api, backend_registry
from telegrad.rpc.agent import Agent
from telegrad.rpc.options import TensorPipeRpcBackendOptions
from telegrad.rref import RRef
from telegrad.types import WorkerInfo
from telegrad.worker import Worker, lifecycle_log
from telegrad.worker.autograd_hooks import WorkerPlugins
from telegrad.worker.diagnostics import signal_dump
from telegrad.worker.membership import joining

__all__ = ["check_identity", "handle_signals", "init_rpc", "is_available", "join", "start_agent"]

logger: logging.Logger = logging.getLogger("telegrad")

_LAYERS = WorkerPlugins(RRef, Autograd)
drop_in: list[bool] = [False]
"""Whether this process runs as a drop-in. Then a missing rank comes from the environment on its own, as in torch."""


class _NotAName(TelegradError, TypeError):
    """Name of a worker that is not a string; torch raises RuntimeError for it."""


def is_available() -> bool:
    """Return whether this package can be used.

    Returns:
        Always True; exists because ``torch.distributed.rpc`` has it.

    Example::

        assert rpc.is_available()
    """
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    store: Any = None,
) -> None:
    """Join a group, and make this process ready to make and to serve calls.

    Blocks until all workers of the group have joined. The process leaves with `shutdown`.

    Args:
        name: of this worker, unique in the group: letters, digits, ``_``, ``-`` and ``:``, fewer than 128 of them.
        backend: a member of ``backend_registry.BackendType``; usually omitted.
        rank: of this worker, unique, from 0. With ``env://`` it may come from the environment (RANK). A worker of a
            dynamic group without a rank gets the next one, or that which its name had before; the first such worker to
            bind the port of ``tcp://`` or ``env://`` hosts the store. With torch's own options a rank is
            required, as in torch.
        world_size: number of workers. If neither it nor the rank is given, both come from RANK and WORLD_SIZE with
            ``env://``, if a launcher like torchrun has set them; ``ranks_from_environment`` of ``Options`` switches
            that off. Without a world size the group is dynamic: workers join and leave at any time.
        rpc_backend_options: ``telegrad.rpc.Options``, or torch's ``TensorPipeRpcBackendOptions``.
        store: a c10d store for the rendezvous, instead of ``init_method``.

    Raises:
        RuntimeError: this process has joined already, a name or rank is taken, the numbers of workers differ, or some
            workers did not join within ``rpc_timeout`` (300 s if that is 0).
        ValueError: the rank is missing or not less than the world size, or an option or its environment variable is
            invalid.
        TypeError: an argument is of the wrong kind. For the name, the error is a RuntimeError as well, as in torch.

    Example::

        rpc.init_rpc("trainer0", rank=0, world_size=4)  # meets the others at MASTER_ADDR:MASTER_PORT
        rpc.rpc_sync("trainer1", print, args=("hello",))
        rpc.shutdown()
    """
    if backend is not None and not backend_registry.is_backend(backend):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    check_identity(name, rank, world_size)
    if backend is None:
        backend = _infer_backend(rpc_backend_options)
    as_torch = isinstance(rpc_backend_options, TensorPipeRpcBackendOptions)
    if rpc_backend_options is None:
        is_default = backend.value is backend_registry.BackendType.TENSORPIPE.value
        # Not those of the registry, which hold torch's defaults whatever the environment says.
        rpc_backend_options = Options() if is_default else backend_registry.construct_rpc_backend_options(backend)
    if not (as_torch or drop_in[0]) and store is None and rank < 0 and world_size is None:
        rank, world_size = stores.ranks_of_launcher(as_options(rpc_backend_options))
        check_identity(name, rank, world_size)
    options = rpc_backend_options
    handle_signals(options)

    def begin(part: Part, rank: int, world_size: int | None) -> None:
        _init_rpc_backend(backend, part, name, rank, world_size, options)

    if store is None:
        join_at(name, options, rank, world_size, begin, ranks_needed=as_torch)
        return
    with prefix_of(store, "", world_size, rank) as prefix:
        join_open_part(store, "", prefix, begin, rank, world_size)


def check_identity(name: str, rank: int, world_size: int | None) -> None:
    """Check the name and the numbers of a worker, before it waits for the store.

    Raises:
        RuntimeError: The name has another form.
        TypeError: The name is not a string, or a number is not a whole number.
        ValueError: The rank is not in the group.
    """
    given: object = name
    if not isinstance(given, str):
        raise _NotAName(f"the name of a worker has to be a string, such as 'worker0', not {given!r}")
    for what, number in (("rank", rank), ("world_size", 0 if world_size is None else world_size)):
        if not hasattr(number, "__index__"):
            raise TypeError(f"the {what} of worker {name} has to be a whole number, not {number!r}; it may be left out")
    WorkerInfo(name, max(rank, 0))
    if world_size and rank >= world_size:
        raise ValueError(f"worker {name} has rank {rank}, but ranks go from 0 to {world_size - 1}.")


def handle_signals(options: RpcBackendOptions | None) -> None:
    """Install the handler of SIGUSR2, if the options ask for it.

    Called before the store is reached, because a worker that waits for others is a common reason for a dump.
    """
    given = options if isinstance(options, Options) else Options()  # as for `as_options`, which logs warnings
    if given.dump_on_sigusr2:
        signal_dump.install()


def _infer_backend(options: RpcBackendOptions | None) -> Any:
    default = backend_registry.BackendType.TENSORPIPE
    if options is None or isinstance(options, (Options, TensorPipeRpcBackendOptions)):
        return default
    for candidate in backend_registry.BackendType:
        try:
            example = backend_registry.construct_rpc_backend_options(candidate)
        except Exception:  # the backend's options need arguments
            logger.debug("backend %s makes no default options", candidate, exc_info=True)
            continue
        if isinstance(options, type(example)):
            logger.warning(
                "RPC was initialized with no explicit backend but with options corresponding to %s, hence that backend"
                " will be used. To silence this warning pass backend=%s explicitly.",
                candidate,
                candidate,
            )
            return candidate
    raise TypeError(f"Could not infer backend for options {options}")


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    if backend is None:
        backend = backend_registry.BackendType.TENSORPIPE
    if api._is_current_rpc_agent_set():
        raise TelegradError("RPC is already initialized. Call shutdown() first, or use a telegrad.rpc.Worker for a"
                            " second group in one process.")  # fmt: skip
    agent = backend_registry.init_backend(
        backend, store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options
    )
    api._init_rpc_states(agent)


def start_agent(store: Store, name: str, rank: int, world_size: int | None, options: Any) -> Agent:
    """Join the group on this store. Handler of the backend."""
    return Agent(join(store, name, rank, world_size, options))


def join(
    store: Store, name: str, rank: int, world_size: int | None, rpc_backend_options: RpcBackendOptions | None
) -> Worker:
    """Create the worker, and wait for the other workers of a static group."""
    options, own_devices = as_options(rpc_backend_options), device_maps.devices_of(rpc_backend_options)
    if own_devices.maps:
        logger.warning("device maps have no effect yet: only tensors on the CPU can be sent")
    static = bool(world_size)
    if static and rank < 0:
        raise ValueError(f"rank parameter missing: worker {name} was given a world_size of {world_size} but no rank.")
    check_identity(name, rank, world_size)  # as the address gives it
    timeout = stores.rendezvous_timeout(options)
    if not static:
        group = rendezvous.agree(store, given_secret(options), False, 0).group
        device_maps.check({name: own_devices}, False)
        store_at = addresses.store_host(options.init_method, store)
        try:
            worker = joining.join_dynamic(store, name, rank, group, options, store_at, _LAYERS, timeout)
        except MembershipError as e:
            raise TelegradError(str(e)) from None
        lifecycle_log.joined(worker)
        return worker
    attempts = Attempts(store, name, rank, timeout, Timing(options.member_lease))
    while True:
        try:
            return _join_static(attempts, name, rank, world_size or 0, options, own_devices, timeout)
        except rendezvous.JoinRefused as e:
            if not attempts.another(e):
                raise


@contextmanager
def _failure_marked(store: Store, rank: int) -> Iterator[None]:
    """Publish a failure in the block as that of a rank, unless the store is lost.

    The store of another group may have the address by now; that group must not fail. Nor can one that has ended.
    """
    try:
        yield
    except (StoreGone, rendezvous.GroupEnded):
        raise
    except Exception as e:
        rendezvous.mark_failed(store, rank, str(e))
        raise


def _join_static(
    attempts: Attempts,
    name: str,
    rank: int,
    world_size: int,
    options: Options,
    own_devices: device_maps.Devices,
    timeout: float,
) -> Worker:
    """Join the latest attempt of a static group."""
    store = attempts.part()
    with _failure_marked(store, rank):
        group, written = rendezvous.agree(store, given_secret(options), True, world_size)
    store_at = addresses.store_host(options.init_method, store)
    try:
        if written is not None:
            founders = rendezvous.members_of(written, group)
            info = WorkerInfo(name, rank)
            worker = joining.rejoin_static(
                store, info, group, founders, options, store_at, _LAYERS, tuple(own_devices), attempts.wait(timeout)
            )
            lifecycle_log.joined(worker)
            return worker
        log = GroupLog(group_store_of(store), group, world_size)
        reservation = reserve(log, name, rank, options, attempts.wait(timeout))
    except MembershipError as e:
        raise rendezvous.JoinRefused(str(e)) from None
    with _failure_marked(store, rank):
        worker, service = joining.create_worker(reservation, log, group, options, store_at, _LAYERS)
    try:
        member = worker.member._replace(devices=tuple(own_devices))
        members = rendezvous.gather_static(store, member, group, world_size, attempts.wait(timeout))
        if next(each for each in members if each.id == rank).incarnation != member.incarnation:
            raise rendezvous.Outdated
        device_maps.check({member.name: device_maps.Devices._make(member.devices) for member in members}, True)
        log.found(members)
        for member in members:
            worker.add_member(member)
        worker.shutdown.set_members([member.id for member in members if member.id != rank])
        joining.serve(worker, service, store)
    except rendezvous.Outdated:
        worker.close()
        return _join_static(attempts, name, rank, world_size, options, own_devices, timeout)  # it finds the list
    except BaseException:
        worker.close()
        raise
    lifecycle_log.joined(worker)
    return worker
