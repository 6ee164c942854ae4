"""Options of ``torch.distributed.rpc``, as programs written for it pass them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from telegrad.options import (
    DEFAULT_INIT_METHOD,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT_SEC,
    Options,
    RpcBackendOptions,
    check_threads,
)

__all__ = ["Options", "RpcBackendOptions", "TensorPipeRpcBackendOptions"]

DeviceType = int | str | torch.device
DeviceMap = dict[torch.device, torch.device]

_is_tensorpipe_available = True

# Torch's own names. They have no effect (Telegrad probes for the transport of each pair), but programs pass them to
# work around defects of the original. So they are checked as in torch, and kept.
_TENSORPIPE_TRANSPORTS: Final = ("uv", "shm", "ibv")
_TENSORPIPE_CHANNELS: Final = ("basic", "cma", "mpt_uv", "cuda_basic", "cuda_ipc", "cuda_gdr", "cuda_xth")


def _check_names(kind: str, names: Sequence[str] | None, known: Iterable[str]) -> None:
    for name in names or ():
        if name not in known:
            raise RuntimeError(f"Unknown {kind}: {name}")


def _device(device: Any) -> torch.device:
    # An index alone means CUDA, also on a machine without CUDA, where torch.device(0) fails.
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _to_device_map(devices: Mapping[object, object]) -> DeviceMap:
    there: DeviceMap = {}
    back: DeviceMap = {}
    for key, value in devices.items():
        here, remote = _device(key), _device(value)
        if remote in back:
            raise ValueError(
                f"`device_map` only supports 1-to-1 mapping, trying to map {here} and {back[remote]} to {remote}"
            )
        there[here] = remote
        back[remote] = here
    return there


def _to_device(device: DeviceType) -> torch.device:
    found = _device(device)
    if found.type != "cuda":
        raise ValueError(f"`set_devices` expect a list of CUDA devices, but got device type {found.type}.")
    return found


def _to_device_list(devices: Iterable[DeviceType]) -> list[torch.device]:
    return [_to_device(device) for device in devices]


class _TensorPipeRpcBackendOptionsBase(RpcBackendOptions):
    """Torch's base class of the options: the stored values, by position."""

    def __init__(
        self,
        num_worker_threads: int,
        _transports: Sequence[str] | None,
        _channels: Sequence[str] | None,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, DeviceMap] | None = None,
        devices: Iterable[torch.device] = (),
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads: int = check_threads(num_worker_threads)
        _check_names("transport", _transports, _TENSORPIPE_TRANSPORTS)
        _check_names("channel", _channels, _TENSORPIPE_CHANNELS)
        self.device_maps: dict[str, DeviceMap] = dict(device_maps or {})
        self.devices: list[torch.device] = list(devices)

    def _set_device_map(self, to: str, device_map: Mapping[object, object]) -> None:
        self.device_maps.setdefault(to, {}).update(_to_device_map(device_map))


class TensorPipeRpcBackendOptions(_TensorPipeRpcBackendOptionsBase):
    """Options of torch's only backend, accepted as in torch.

    All attributes can be set.

    Args:
        num_worker_threads: number of requests that run at once.
        rpc_timeout: default timeout of calls in seconds; 0 is no limit.
        init_method: address of the rendezvous.
        device_maps: worker name to a map from devices of this worker to devices of that one, one to one.
        devices: the CUDA devices that this worker uses; by default those of the maps.

    Raises:
        TypeError: a value of the wrong kind.
        ValueError: a map that is not one to one, or a device that is not a CUDA device.
        RuntimeError: a negative timeout, no threads, or a transport or channel that torch does not know.

    Example::

        options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=30)
        rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
        rpc.shutdown()
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[Any, Any]] | None = None,
        devices: Iterable[DeviceType] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            num_worker_threads,
            _transports,
            _channels,
            rpc_timeout,
            init_method,
            {to: _to_device_map(m) for to, m in (device_maps or {}).items()},
            _to_device_list(devices or ()),
        )

    def set_device_map(self, to: str, device_map: Mapping[object, object]) -> None:
        """Add to the map from this worker's devices to those of the worker ``to``.

        May be called repeatedly.

        Args:
            to: the worker's name.
            device_map: device of this worker to device of that one; a device is an index, a string or a torch.device.

        Raises:
            ValueError: two devices are mapped to one, or one device to two.
        """
        new = _to_device_map(device_map)
        old = self.device_maps.setdefault(to, {})
        for here, there in new.items():
            if old.get(here, there) != there:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {here} to {there} and {old[here]}"
                )
        old.update(new)

    def set_devices(self, devices: Iterable[DeviceType]) -> None:
        """Set the CUDA devices that this worker uses.

        Raises:
            ValueError: one of them is not a CUDA device.
        """
        self.devices: list[torch.device] = _to_device_list(devices)
