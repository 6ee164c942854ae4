"""What ``torch.distributed.autograd`` points at in a drop-in. There are no contexts yet, hence none to report."""

from telegrad.compat.unbuilt import unbuilt

__all__: list[str] = []

__getattr__ = unbuilt(__name__, "distributed autograd")


def is_available() -> bool:
    """Whether there is a distributed autograd at all: the question that programs ask of a torch built without it."""
    return True


def _init(worker_id: int) -> None:
    """Called by ``init_rpc`` in torch."""


def _get_debug_info() -> dict[str, str]:
    return {"num_current_backward_passes": "0", "num_autograd_contexts": "0"}
