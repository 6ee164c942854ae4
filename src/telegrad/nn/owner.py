"""Functions that run on the owner of a remote module.

Each one takes a reference to the module, which this worker owns.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from copy import copy
from enum import IntEnum
from types import CoroutineType
from typing import Any

import torch
from torch import Tensor, nn

from telegrad.autograd.consistency.saved_tensors import between_steps
from telegrad.errors import NotExposed
from telegrad.nn.method_names import method_names
from telegrad.rref import RRef
from telegrad.worker import Worker
from telegrad.worker.calls.callables import callee_of
from telegrad.worker.calls.interceptors import own

__all__ = [
    "AttributeInfo",
    "change",
    "forward_on_device",
    "items_on_device",
    "load_state",
    "make_module",
    "parameters_of",
    "read_member",
    "state_of",
    "submodule_of",
]

_CPU = torch.device("cpu")


def make_module(
    module_cls: bytes | Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    device: str,
    interface: object = None,
) -> nn.Module:
    """Create a module on a device.

    Args:
        module_cls: the class of the module, or its name in messages.
        interface: a TorchScript interface for which to script the module; None leaves it unchanged.
    """
    module = callee_of(module_cls)(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    module.to(device)
    return module if interface is None else torch.jit.script(module)


def forward_on_device(module: RRef[nn.Module], device: str, keep: bool, args: object, kwargs: dict[str, object]) -> Any:
    """Run the module with its tensors moved to its device, and return the results.

    Args:
        keep: leave the results on the device (a device map covers it); otherwise move them to the CPU.
    """
    there = torch.device(device)
    forward = module.worker.handlers.exposure.method_of(module.local_value(), "__call__")
    result = forward(*moved(args, there), **moved(kwargs, there))
    if isinstance(result, CoroutineType):
        return _moved_later(result, keep)
    return result if keep else moved(result, _CPU)


def items_on_device(module: RRef[nn.Module], device: str, keep: bool, args: object, kwargs: dict[str, object]) -> Any:
    """Run a module, a generator, as `forward_on_device` does; return its items."""
    items = forward_on_device(module, device, True, args, kwargs)
    if keep:
        return items
    if hasattr(type(items), "__anext__"):
        return _MovedAsyncItems(items)
    return _MovedItems(items) if hasattr(type(items), "__next__") else items


class _MovedItems:
    """Iterator of items that are moved to the CPU."""

    def __init__(self, items: Iterator[object]) -> None:
        self._items = items

    def __next__(self) -> object:
        return moved(next(self._items), _CPU)

    def close(self) -> None:
        close = getattr(self._items, "close", None)
        if close is not None:
            close()


class _MovedAsyncItems:
    """Asynchronous iterator of items that are moved to the CPU."""

    def __init__(self, items: AsyncIterator[object]) -> None:
        self._items = items

    async def __anext__(self) -> object:
        return moved(await anext(self._items), _CPU)

    async def aclose(self) -> None:
        close = getattr(self._items, "aclose", None)
        if close is not None:
            await close()


async def _moved_later(result: Awaitable[object], keep: bool) -> object:
    """Await the result of a module with an ``async def forward``."""
    value = await result
    return value if keep else moved(value, _CPU)


def moved(value: object, device: torch.device) -> Any:
    """Return a value with all tensors in its tuples, lists and dicts on a device.

    Dicts of other classes, such as ``defaultdict``, are copied with what else they have.
    """
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) is dict:
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, dict):
        result = copy(value)  # the constructor may take other arguments than that of dict
        for key, item in value.items():
            result[key] = moved(item, device)
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(moved(item, device) for item in value)
    return value


def _method_of(module: RRef[nn.Module], name: str) -> Any:
    """Return a method of the module, if this worker exposes it."""
    return module.worker.handlers.exposure.method_of_module(module.local_value(), name)


def parameters_of(module: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    """Return references to the module's parameters."""
    return [RRef(parameter) for parameter in _method_of(module, "parameters")(recurse)]


def submodule_of(module: RRef[nn.Module], target: str) -> tuple[RRef[nn.Module], tuple[str, ...]]:
    """Return a reference to a submodule, and the names of its methods."""
    found = _method_of(module, "get_submodule")(target)
    return RRef(found), _methods_of(module.worker, found)


def change(module: RRef[nn.Module], method: str, args: Sequence[object], kwargs: Mapping[str, object]) -> str | None:
    """Call a method that changes the module; return the device of its first tensor."""
    value = module.local_value()
    _method_of(module, method)(*args, **kwargs)
    first = next((t for tensors in (value.parameters(), value.buffers()) for t in tensors), None)
    return None if first is None else str(first.device)


def state_of(module: RRef[nn.Module], keep: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the module's state at one moment, and the state's metadata.

    Args:
        keep: leave tensors on their device; otherwise move them to the CPU.
    """
    with between_steps(module.worker):
        state = _method_of(module, "state_dict")()
        # Copies: the result is sent after this function has returned, and a step may follow before that.
        plain = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
    return plain if keep else moved(plain, _CPU), {key: dict(v) for key, v in getattr(state, "_metadata", {}).items()}


def load_state(
    module: RRef[nn.Module], state: dict[str, object], metadata: dict[str, object] | None, assign: bool
) -> tuple[list[str], list[str], str]:
    """Load a state.

    Return the missing keys, the unexpected keys, and the text of other errors.
    """
    given = _WithMetadata(state)
    if metadata is not None:
        given._metadata = metadata
    try:
        result = _method_of(module, "load_state_dict")(given, strict=False, assign=assign)
    except RuntimeError as e:  # all matching entries have been loaded
        return [], [], str(e)
    return list(result.missing_keys), list(result.unexpected_keys), ""


class _WithMetadata(dict[str, Any]):
    _metadata: dict[str, object]


class AttributeInfo(IntEnum):
    """Kind of a module's attribute."""

    MISSING = 0
    METHOD = 1
    TENSOR = 2
    MODULE = 3
    VALUE = 4


def read_member(
    module: RRef[nn.Module], name: str, with_methods: bool = False
) -> tuple[int, Any, tuple[str, ...] | None]:
    """Return an attribute: its kind, a plain value, and the names of methods.

    Args:
        with_methods: return the names of the methods that the module has by its class and that this worker exposes;
            otherwise None.
    """
    value, worker = module.local_value(), module.worker
    methods = _methods_of(worker, value) if with_methods else None
    try:
        member = worker.handlers.exposure.read(value, name)
    except AttributeError:
        if hasattr(type(value), name):  # a property raised the error
            raise
        return AttributeInfo.MISSING, type(value).__name__, methods
    kind = _kind_of(member)
    return kind, member if kind == AttributeInfo.VALUE else None, methods


def _kind_of(member: object) -> AttributeInfo:
    if isinstance(member, nn.Module):
        return AttributeInfo.MODULE
    if isinstance(member, Tensor):
        return AttributeInfo.TENSOR
    return AttributeInfo.METHOD if callable(member) and not isinstance(member, type) else AttributeInfo.VALUE


def _methods_of(worker: Worker, value: nn.Module) -> tuple[str, ...]:
    """Return the names of exposed methods that a module has by its class.

    A method that the module has replaced by a value is none.
    """
    return tuple(name for name in method_names(type(value)) if _is_exposed_method(worker, value, name))


def _is_exposed_method(worker: Worker, value: nn.Module, name: str) -> bool:
    try:
        return _kind_of(worker.handlers.exposure.read(value, name)) == AttributeInfo.METHOD
    except NotExposed:
        return False


own.update((make_module, forward_on_device, parameters_of, submodule_of, change, state_of, load_state, read_member))
