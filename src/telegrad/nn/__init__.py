"""Modules that reside on other workers: the API of ``torch.distributed.nn``.

`RemoteModule` and `Pipeline` are Telegrad's own. The differentiable collectives of ``torch.distributed.nn`` are
torch's, loaded at first use.
"""

import importlib
from typing import Any

from telegrad.nn.pipeline import Pipeline, StepTimes
from telegrad.nn.remote_module import RemoteModule

_COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)

__all__ = ["Pipeline", "RemoteModule", "StepTimes", "functional", *_COLLECTIVES]  # noqa: PLE0604  # all are strings


def __getattr__(name: str) -> Any:
    # Late import: without a drop-in, torch's package imports torch's own RPC as well.
    if name == "functional" or name in _COLLECTIVES:
        functional = importlib.import_module("torch.distributed.nn.functional")
        return functional if name == "functional" else getattr(functional, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
