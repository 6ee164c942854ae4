"""Device maps: which device of a worker stands for which of another's. They are checked when a group meets, in torch's
words. (Tensors on other devices than the CPU do not travel yet.)"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

__all__ = ["Devices", "check", "devices_of"]


class Devices(NamedTuple):
    """What a worker says of its devices; plain values, as it goes through the store."""

    cuda: int  # how many CUDA devices there are
    own: list[str]  # those that it uses, if it says so
    maps: dict[str, dict[str, str]]  # by the name of the other worker: device here to device there


def devices_of(options: Any) -> Devices:
    """What the options of a program say, be they torch's or Telegrad's (which have no maps)."""
    own = [str(device) for device in getattr(options, "devices", None) or ()]
    given: Mapping[str, Mapping[Any, Any]] = getattr(options, "device_maps", None) or {}
    maps = {to: {str(here): str(there) for here, there in devices.items()} for to, devices in given.items()}
    return Devices(torch.cuda.device_count(), own, maps)


def check(members: Mapping[str, Devices], all_known: bool) -> None:
    """Checks what all members of a group say, or those that are known.

    Args:
        members: by name.
        all_known: nobody else is in the group, so a map for somebody else is an error.

    Raises:
        ValueError: something does not fit; in torch's words.
    """
    choosy = {name: devices for name, devices in members.items() if devices.own or devices.maps}
    for name, devices in choosy.items():
        if len(set(devices.own)) != len(devices.own):
            raise ValueError(f"Node {name} has duplicated devices\ndevices = {devices.own}")
        if not _exist(devices.own, devices.cuda):
            raise ValueError(
                f"Node {name} has devices with invalid indices\ndevices = {devices.own}\ndevice count = {devices.cuda}"
            )
    for name, devices in choosy.items():
        strangers = devices.maps.keys() - members.keys()
        if strangers and all_known:
            raise ValueError(
                f"Node {name} has invalid target node names in its device maps\n"
                f"device maps = {sorted(devices.maps)}\nnode names = {sorted(members)}"
            )
        for to, devices_there in devices.maps.items():
            _check_map(name, devices, to, members.get(to), devices_there)


def _check_map(name: str, source: Devices, to: str, target: Devices | None, devices: dict[str, str]) -> None:
    where = f"in its device map for {to}\ndevice map = {devices}\n"
    if len(set(devices.values())) != len(devices):
        raise ValueError(f"Node {name} has duplicated target devices {where}")
    for kind, one, used in (("source", source, devices.keys()), ("target", target, devices.values())):
        if one is None:  # it has not joined yet
            continue
        if one.own:
            if not set(used) <= set(one.own):
                raise ValueError(f"Node {name} has unexpected {kind} devices {where}devices = {one.own}")
        elif not _exist(used, one.cuda):
            raise ValueError(f"Node {name} has {kind} devices with invalid indices {where}device count = {one.cuda}")


def _exist(devices: Iterable[str], cuda: int) -> bool:
    found = [torch.device(device) for device in devices]
    return all(d.type == "cpu" or (d.type == "cuda" and 0 <= (d.index or 0) < cuda) for d in found)
