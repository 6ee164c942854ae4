"""``torch.futures.wait_all`` as torch documents it, also for Telegrad's futures.

It returns at the first error. Torch's own does so only for errors set by C++ code. A future that Python code fails
(``set_exception``) counts as successful in C++ and raises when it is read: this is the only way to keep the exception's
type. So torch's ``wait_all`` would wait for all other futures before it raised.
"""

from collections.abc import Iterable
from typing import Any

import torch.futures
from torch.futures import Future

from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.wait_all import wait_all as _wait_all

__all__ = ["wait_all"]

_torch_wait_all = torch.futures.wait_all


def wait_all(futures: Iterable[Future[Any]]) -> list[Any]:
    """Wait for all futures, as `telegrad.rpc.wait_all` does.

    If none of the futures is Telegrad's, torch's own function waits.
    """
    given = list(futures)
    if not any(isinstance(future, CallFuture) for future in given):
        return _torch_wait_all(given)
    return _wait_all(given)
