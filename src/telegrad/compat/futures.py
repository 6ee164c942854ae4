"""``torch.futures.wait_all`` as torch documents it, for Telegrad's futures as well.

It is to leave at the first error. Torch's own does so only for errors that its C++ code has set.
A future that Python code fails (``set_exception``) is, to C++, one that has succeeded and raises
when it is read, which is the only way to keep the exception's type; so torch's ``wait_all`` would
wait for all the others before it raised.
"""

from typing import Any

import torch.futures
from torch.futures import Future

from telegrad.worker import waiting
from telegrad.worker.future import CallFuture

__all__ = ["install_wait_all", "wait_all"]

_torch_wait_all = torch.futures.wait_all


def wait_all(futures: list[Future[Any]]) -> list[Any]:
    """`telegrad.rpc.wait_all` for futures of which any is Telegrad's; torch's own for others."""
    if not any(isinstance(future, CallFuture) for future in futures):
        return _torch_wait_all(futures)
    return waiting.wait_all(futures)


def install_wait_all() -> None:
    """Puts :func:`wait_all` in the place of torch's."""
    torch.futures.wait_all = wait_all
