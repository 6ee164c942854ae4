"""What ``torch.distributed.nn.api.remote_module`` points at in a drop-in."""

from telegrad.compat.unbuilt import unbuilt

__all__: list[str] = []

__getattr__ = unbuilt(__name__, "RemoteModule")
