"""Parameters that optimizers of this worker step, and the memory that lies under them."""

import threading
import weakref
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any, Final

import torch
from torch.autograd.graph import increment_version

from telegrad.autograd.versions import gate_for, is_shared, put, renew

__all__ = ["Managed", "in_one_order", "managed", "taking_turns"]

_KNOWN: Final = "optim.parameters"  # in a worker's extras

_count_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class Managed:
    """One parameter, whichever optimizers step it. The attributes but for the first are guarded by `lock`.

    Attributes:
        parameter: a leaf tensor.
        lock: held while it is stepped, by one optimizer at a time.
        shared: its memory is shared with other processes, so it has to stay where it is.
    """

    __slots__ = ("__weakref__", "_spare", "lock", "parameter", "shared")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter: torch.Tensor = parameter
        self.lock: threading.RLock = threading.RLock()
        self.shared: bool = is_shared(parameter)
        self._spare: torch.Tensor | None = None  # memory that was under it before

    def in_use(self) -> bool:
        """Does anything else refer to its memory: a graph that has saved it, a message that is being sent, a view?"""
        return not _has_storage(self.parameter) or _in_use(self.parameter)

    def copy(self) -> torch.Tensor:
        """Its values in other memory, warm where possible."""
        now = self.parameter.data
        spare, self._spare = self._spare, None
        if spare is None or _in_use(spare) or not _alike(spare, now):
            return now.clone()
        renew(spare)
        return spare.copy_(now)

    def put(self, new: torch.Tensor) -> None:
        """Puts memory with new values under it; of a shared one, the values into its memory."""
        if self.shared:
            with torch.no_grad():
                self.parameter.copy_(new)
        else:
            self._spare = put(self.parameter, new)

    def written(self) -> None:
        """Its memory was written to through another tensor."""
        increment_version(self.parameter)
        self._spare = None


def managed(worker: Any, parameters: Sequence[torch.Tensor]) -> list[Managed]:
    """The records of these parameters of a worker, which share a record with other optimizers of the same ones. They
    live as long as an optimizer holds them."""
    known = worker.extras.setdefault(_KNOWN, weakref.WeakValueDictionary())
    gate = gate_for(worker)
    result = []
    with _making:
        for parameter in parameters:
            one = known.get(id(parameter))
            if one is None:
                one = known[id(parameter)] = Managed(parameter)
                gate.copies_shared = gate.copies_shared or one.shared
            result.append(one)
    return result


_making = threading.Lock()


class taking_turns:  # a class is half the price of a generator
    """Within, no other optimizer steps these parameters.

    Args:
        parameters: in the order of `in_one_order`.
        timeout: seconds to wait for others; -1 is no limit.

    Raises:
        TimeoutError: another optimizer is still stepping one of them.
    """

    __slots__ = ("_held", "_parameters", "_timeout")

    def __init__(self, parameters: Sequence[Managed], timeout: float) -> None:
        self._parameters = parameters
        self._timeout = timeout
        self._held = 0

    def __enter__(self) -> None:
        for one in self._parameters:
            if not one.lock.acquire(timeout=self._timeout):
                self.__exit__()
                raise TimeoutError(
                    f"another optimizer was still stepping a parameter of shape {list(one.parameter.shape)} after"
                    f" {self._timeout:g} s. Steps of the same parameters run one after another."
                )
            self._held += 1

    def __exit__(self, *_: object) -> None:
        while self._held:
            self._held -= 1
            self._parameters[self._held].lock.release()


def in_one_order(parameters: Sequence[Managed]) -> list[Managed]:
    """The order in which all optimizers take them, so that nobody waits in a circle."""
    return sorted(set(parameters), key=id)


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _in_use(tensor: torch.Tensor) -> bool:
    """Does anything but this tensor refer to its memory?"""
    if _count_uses is None:  # then nobody can tell
        return True
    uses, references = _count(tensor)
    return uses > _ALONE[0] or references > _ALONE[1]


def _count(tensor: torch.Tensor) -> tuple[int, int]:
    """How much refers to a tensor's storage (tensors, and its Python object), and to that object, as a message that is
    on its way does."""
    storage = tensor.untyped_storage()
    return _count_uses(storage._cdata) if _count_uses is not None else 0, getrefcount(storage)


_ALONE: Final = _count(torch.empty(1))  # of a tensor that has its storage for itself


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.stride() == b.stride()
