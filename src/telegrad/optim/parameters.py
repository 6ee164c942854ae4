"""Parameters that optimizers of this worker step, and their memory."""

import threading
import weakref
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Final

import torch
from torch.autograd.graph import increment_version

from telegrad.autograd.consistency.saved_tensors import HasAttachments, is_shared, protect, reuse_storage, swap_storage

__all__ = ["ManagedParameter", "locked_in_order", "managed", "sorted_for_locking"]

_KNOWN: Final = "optim.parameters"  # key in a worker's attachments

_count_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class ManagedParameter:
    """Parameter with its lock, shared by all optimizers that step it.

    The lock guards all attributes except `parameter`.

    Attributes:
        parameter: a leaf tensor.
        lock: held while the parameter is stepped, by one optimizer at a time.
        shared: whether other processes share its memory, so that it must not move.
    """

    __slots__ = ("__weakref__", "_spare", "lock", "parameter", "shared")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter: torch.Tensor = parameter
        self.lock: threading.RLock = threading.RLock()
        self.shared: bool = is_shared(parameter)
        self._spare: torch.Tensor | None = None  # its previous memory

    def in_use(self) -> bool:
        """Return whether anything else refers to the parameter's memory.

        That may be a graph that has saved it, a message being sent, or a view.
        """
        return not _has_storage(self.parameter) or _in_use(self.parameter)

    def copy(self) -> torch.Tensor:
        """Return the values in other memory, which is reused if possible."""
        now = self.parameter.data
        spare, self._spare = self._spare, None
        if spare is None or _in_use(spare) or not _alike(spare, now):
            return now.clone()
        reuse_storage(spare)
        return spare.copy_(now)

    def swap_storage(self, new: torch.Tensor) -> None:
        """Replace the parameter's memory, or copy the values if the memory is shared."""
        if self.shared:
            with torch.no_grad():
                self.parameter.copy_(new)
        else:
            self._spare = swap_storage(self.parameter, new)

    def written(self) -> None:
        """Record that the memory was written to through another tensor."""
        increment_version(self.parameter)
        self._spare = None


def managed(worker: HasAttachments, parameters: Sequence[torch.Tensor]) -> list[ManagedParameter]:
    """Return the records of a worker's parameters.

    Optimizers of the same parameter share its record, which lives as long as one of them.
    """
    known = worker.attachments.setdefault(_KNOWN, weakref.WeakValueDictionary())
    protection = protect(worker)
    result = []
    with _making:
        for parameter in parameters:
            one = known.get(id(parameter))
            if one is None:
                one = known[id(parameter)] = ManagedParameter(parameter)
                protection.copies_shared = protection.copies_shared or one.shared
            result.append(one)
    return result


_making = threading.Lock()


class locked_in_order:  # a class costs half of a generator
    """Context manager in which no other optimizer steps the given parameters.

    Args:
        parameters: in the order of `sorted_for_locking`.
        timeout: seconds to wait for others; -1 is no limit.

    Raises:
        TimeoutError: another optimizer is still stepping one of them.
    """

    __slots__ = ("_held", "_parameters", "_timeout")

    def __init__(self, parameters: Sequence[ManagedParameter], timeout: float) -> None:
        self._parameters = parameters
        self._timeout = timeout
        self._held = 0

    def __enter__(self) -> None:
        try:
            for one in self._parameters:
                if not one.lock.acquire(timeout=self._timeout):
                    raise TimeoutError(
                        f"another optimizer was still stepping a parameter of shape {list(one.parameter.shape)} after"
                        f" {self._timeout:g} s. Steps of the same parameters run one after another."
                    )
                self._held += 1
        except BaseException:  # as of a signal handler, during the wait
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        while self._held:
            self._held -= 1
            self._parameters[self._held].lock.release()


def sorted_for_locking(parameters: Sequence[ManagedParameter]) -> list[ManagedParameter]:
    """Sort parameters into the order in which all optimizers lock them.

    A common order prevents deadlocks.
    """
    return sorted(set(parameters), key=id)


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _in_use(tensor: torch.Tensor) -> bool:
    """Return whether anything but this tensor refers to its memory."""
    if _count_uses is None:  # unknown: assume that it is in use
        return True
    uses, references = _count(tensor)
    return uses > _ALONE[0] or references > _ALONE[1]


def _count(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many objects refer to a tensor's storage, and to its Python object.

    Tensors and the Python object refer to the storage. A message being sent refers to the Python object.
    """
    storage = tensor.untyped_storage()
    return _count_uses(storage._cdata) if _count_uses is not None else 0, getrefcount(storage)


_ALONE: Final = _count(torch.empty(1))  # counts of a tensor that is the only user of its storage


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.stride() == b.stride()
