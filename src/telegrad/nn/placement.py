"""Placement of a remote module: a worker and a device, in one text."""

from typing import NamedTuple

import torch

__all__ = ["Placement", "placement_of"]

_FORMS = (
    "Could not parse remote_device: {}. The valid format is '<workername>/<device>' or 'rank:<rank>/<device>' or"
    " '<device>'"
)


class Placement(NamedTuple):
    """Worker, by name or rank, and one of its devices."""

    on: str | int | None  # None: the calling worker
    device: torch.device


def placement_of(text: str | torch.device) -> Placement:
    """Parse a remote device.

    The forms are ``"worker/device"``, ``"rank:N/device"``, ``"worker"``, ``"rank:N"`` and ``"device"``. The default
    device is the CPU, the default worker is the calling one. A worker with the name of a device needs the long form.

    Raises:
        ValueError: the text has none of these forms.
        RuntimeError: torch does not know the device.
        TypeError: the argument is neither text nor a device.
    """
    if isinstance(text, torch.device):
        return Placement(None, text)
    if not isinstance(text, str):
        raise TypeError(f"Invalid type for remote_device: {type(text)}")
    fields = text.split("/")
    if len(fields) == 1:
        local = _device(fields[0])
        if local is not None:
            return Placement(None, local)
        fields.append("cpu")
    if len(fields) != 2 or not fields[0]:
        raise ValueError(_FORMS.format(text))
    worker, device = fields
    placed = torch.device(device)
    kind, colon, rank = worker.partition(":")
    if not colon:
        return Placement(worker, placed)
    if kind != "rank" or not rank.isdigit():
        raise ValueError(_FORMS.format(text))
    return Placement(int(rank), placed)


def _device(text: str) -> torch.device | None:
    try:
        return torch.device(text)
    except RuntimeError:
        return None
