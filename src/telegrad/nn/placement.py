"""Where a remote module is to live: a worker and a device, named in one text."""

from typing import NamedTuple

import torch

__all__ = ["Placement", "placement_of"]

_FORMS = (
    "Could not parse remote_device: {}. The valid format is '<workername>/<device>' or 'rank:<rank>/<device>' or"
    " '<device>'"
)


class Placement(NamedTuple):
    """A worker, by name or rank, and a device of it."""

    on: str | int | None  # None: the worker that asks
    device: torch.device


def placement_of(text: str | torch.device) -> Placement:
    """Reads ``"worker/device"``, ``"rank:N/device"``, ``"worker"``, ``"rank:N"`` or ``"device"``. Without a device it
    is the CPU; without a worker, the one that asks. A worker that is called like a device needs the long form.

    Raises:
        ValueError: it is none of these.
        RuntimeError: torch knows no such device.
        TypeError: it is neither text nor a device.
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
