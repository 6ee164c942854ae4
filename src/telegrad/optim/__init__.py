"""Optimizers of parameters on other workers: API of ``torch.distributed.optim``.

`DistributedOptimizer`, and what works with it, are Telegrad's own. All other names of ``torch.distributed.optim`` are
torch's, loaded at first use.
"""

from typing import Any, Final

from telegrad.autograd.consistency.saved_tensors import unprotected
from telegrad.optim.checkpoint import load_checkpoint
from telegrad.optim.clipping import clip_grad_norm_
from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.grad_scaler import GradScaler
from telegrad.optim.local import between_steps

_TORCHS: Final = {
    "PostLocalSGDOptimizer": "torch.distributed.optim",
    "ZeroRedundancyOptimizer": "torch.distributed.optim",
    "as_functional_optim": "torch.distributed.optim",
    "functional_optim_map": "torch.distributed.optim.utils",
    "register_functional_optim": "torch.distributed.optim.utils",
}
"""Torch's names and their modules."""

__all__ = [
    "DistributedOptimizer",
    "GradScaler",
    "PostLocalSGDOptimizer",
    "ZeroRedundancyOptimizer",
    "as_functional_optim",
    "between_steps",
    "clip_grad_norm_",
    "functional_optim_map",
    "load_checkpoint",
    "register_functional_optim",
    "unprotected",
]


def __getattr__(name: str) -> Any:
    # Late import: without a drop-in, torch's package imports torch's own RPC as well.
    import importlib

    if name in _TORCHS:
        return getattr(importlib.import_module(_TORCHS[name]), name)
    if name.startswith(("_Functional", "_apply_optimizer", "_get_in_backward", "_NamedOptimizer")):
        return getattr(importlib.import_module("torch.distributed.optim"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
