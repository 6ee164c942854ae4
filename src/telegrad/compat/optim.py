"""What ``torch.distributed.optim.optimizer`` points at in a drop-in."""

from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.local import LocalOptimizer as _LocalOptimizer

__all__ = ["DistributedOptimizer"]

_ScriptLocalOptimizer = _LocalOptimizer  # one for all classes: none is compiled by TorchScript
