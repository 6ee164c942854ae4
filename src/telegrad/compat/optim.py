"""What ``torch.distributed.optim.optimizer`` points at in a drop-in."""

from telegrad.compat.unbuilt import unbuilt

__all__: list[str] = []

__getattr__ = unbuilt(__name__, "distributed optimizer")
