"""Device maps: which devices of two workers correspond to each other.

A group checks them when it meets, with torch's error texts. Tensors on devices other than the CPU cannot be sent yet.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

__all__ = ["Devices", "check", "devices_of"]


class Devices(NamedTuple):
    """Devices of a worker as plain values, for the store."""

    cuda: int  # number of CUDA devices
    own: list[str]  # devices in use, if the options name any
    maps: dict[str, dict[str, str]]  # by the name of the other worker: local device to remote device


def devices_of(options: Any) -> Devices:
    """Return the devices in a program's options, of torch or of Telegrad."""
    own = [str(device) for device in getattr(options, "devices", None) or ()]
    given: Mapping[str, Mapping[Any, Any]] = getattr(options, "device_maps", None) or {}
    maps = {to: {str(here): str(there) for here, there in devices.items()} for to, devices in given.items()}
    return Devices(torch.cuda.device_count(), own, maps)


def check(members: Mapping[str, Devices], all_known: bool) -> None:
    """Check the devices of all known members of a group.

    Args:
        members: Devices by worker name.
        all_known: The group has no other members, so a map for another worker is an error.

    Raises:
        ValueError: The devices are inconsistent; the text is torch's.
    """
    configured = {name: devices for name, devices in members.items() if devices.own or devices.maps}
    for name, devices in configured.items():
        if len(set(devices.own)) != len(devices.own):
            raise ValueError(f"Node {name} has duplicated devices\ndevices = {devices.own}")
        if not _exist(devices.own, devices.cuda):
            raise ValueError(
                f"Node {name} has devices with invalid indices\ndevices = {devices.own}\ndevice count = {devices.cuda}"
            )
    for name, devices in configured.items():
        unknown = devices.maps.keys() - members.keys()
        if unknown and all_known:
            raise ValueError(
                f"Node {name} has invalid target node names in its device maps\n"
                f"device maps = {sorted(devices.maps)}\nnode names = {sorted(members)}"
            )
        for to, remote_devices in devices.maps.items():
            _check_map(name, devices, to, members.get(to), remote_devices)


def _check_map(name: str, source: Devices, to: str, target: Devices | None, devices: dict[str, str]) -> None:
    where = f"in its device map for {to}\ndevice map = {devices}\n"
    if len(set(devices.values())) != len(devices):
        raise ValueError(f"Node {name} has duplicated target devices {where}")
    for kind, one, used in (("source", source, devices.keys()), ("target", target, devices.values())):
        if one is None:  # the worker has not joined yet
            continue
        if one.own:
            if not set(used) <= set(one.own):
                raise ValueError(f"Node {name} has unexpected {kind} devices {where}devices = {one.own}")
        elif not _exist(used, one.cuda):
            raise ValueError(f"Node {name} has {kind} devices with invalid indices {where}device count = {one.cuda}")


def _exist(devices: Iterable[str], cuda: int) -> bool:
    found = [torch.device(device) for device in devices]
    return all(d.type == "cpu" or (d.type == "cuda" and 0 <= (d.index or 0) < cuda) for d in found)
