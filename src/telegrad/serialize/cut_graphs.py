"""Warning about gradients that end at a tensor received from another worker.

Outside of an autograd context a tensor that requires grad arrives as a leaf. If it is the result of a graph on the
sender, `loss.backward()` fills the leaf's `.grad` on the receiver and never reaches that graph. So the sender trains
nothing. A reply that arrives after its context has ended counts as received outside of one.
"""

import os
import sys
import warnings
from types import FrameType

import torch

import telegrad

__all__ = ["cut_graphs", "is_watched", "watch_cut"]

TEXT = (
    "The gradient of a tensor that came from another worker has ended here, in its .grad: it was received outside of an"
    " autograd context, so the graph that made it on the other worker gets no gradient, and that worker trains nothing."
    " Make the call in `with telegrad.autograd.context() as context_id:` and call"
    " `telegrad.autograd.backward(context_id, [loss])`, or call `loss.backward()` with `Options(plain_backward=True)`."
    " If the gradient is meant to stay here, send a detached tensor."
    " (This warning is shown once per process.)"
)

_has_warned = False


def watch_cut(tensor: torch.Tensor) -> None:
    """Warn when a received leaf gets its first gradient, once per process.

    Args:
        tensor: A leaf that requires grad and that had a graph on its sender.
    """
    if not _has_warned:
        tensor.register_post_accumulate_grad_hook(_warn)  # type: ignore[no-untyped-call]


def cut_graphs(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Make watched leaves of the tensors of a message whose context has ended."""
    for tensor in tensors:
        tensor.requires_grad_(True)
        watch_cut(tensor)
    return tensors


def is_watched(tensor: torch.Tensor) -> bool:
    """Return whether another worker sent this leaf without its graph."""
    hooks = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return hooks is not None and _warn in hooks.values()


def _warn(_: torch.Tensor) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(TEXT, stacklevel=_depth_of_program())


_LIBRARIES = tuple(os.path.dirname(module.__file__ or "") + os.sep for module in (torch, telegrad))


def _depth_of_program() -> int:
    """Return the frames from `_warn` to the program's code, for `stacklevel`."""
    depth = 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        depth, frame = depth + 1, frame.f_back
    return depth
