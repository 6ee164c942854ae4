"""Methods of remote modules, as the program gets them from a `RemoteModule`."""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from telegrad import rpc
from telegrad.nn import owner
from telegrad.rref import RRef
from telegrad.streams.stream import Stream
from telegrad.worker.calls.future import CallFuture

__all__ = ["ForwardMethod", "ModuleMethod", "forward_method", "needs_moves"]


class _Module(Protocol):
    """Part of a `RemoteModule` that its methods use."""

    device: str
    is_device_map_set: bool
    module_rref: RRef[nn.Module]

    def forward_async(self, *args: object, **kwargs: object) -> CallFuture[Any]: ...


def needs_moves(device: str) -> bool:
    """Return whether a module's arguments and results have to be moved."""
    return torch.device(device).type not in ("cpu", "meta")


class ModuleMethod:
    """Method of a remote module; a call runs on the owner and returns the result."""

    def __init__(self, module: _Module, name: str) -> None:
        self._module = module
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return getattr(self._module.module_rref.rpc_sync(), self._name)(*args, **kwargs)

    def rpc_async(self, *args: object, **kwargs: object) -> CallFuture[Any]:
        """Call the method; return a future."""
        future: CallFuture[Any] = getattr(self._module.module_rref.rpc_async(), self._name)(*args, **kwargs)
        return future

    async def call(self, *args: object, **kwargs: object) -> Any:
        """Call the method as a coroutine."""
        return await self.rpc_async(*args, **kwargs)

    def remote(self, *args: object, **kwargs: object) -> RRef[Any]:
        """Call the method; the owner keeps the result. Return a reference to it."""
        result: RRef[Any] = getattr(self._module.module_rref.remote(), self._name)(*args, **kwargs)
        return result

    def stream(self, *args: object, **kwargs: object) -> Stream[Any]:
        """Call the method, a generator; return the stream of its items."""
        stream: Stream[Any] = getattr(self._module.module_rref.stream(), self._name)(*args, **kwargs)
        return stream

    def __repr__(self) -> str:
        return f"<method {self._name} of {self._module!r}>"


class ForwardMethod(ModuleMethod):
    """`forward` of a remote module.

    It runs the remote module with its hooks, and moves tensors to its device. Other attributes are those of the bound
    method.
    """

    def __init__(self, module: _Module, function: Callable[..., Any]) -> None:
        super().__init__(module, "forward")
        self._function = function

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._function(self._module, *args, **kwargs)

    def rpc_async(self, *args: object, **kwargs: object) -> CallFuture[Any]:
        """Run the module; return a future."""
        return self._module.forward_async(*args, **kwargs)

    def remote(self, *args: object, **kwargs: object) -> RRef[Any]:
        """Run the module and return a reference to the result.

        The owner keeps the result, on the module's device.
        """
        module, rref = self._module, self._module.module_rref
        if needs_moves(module.device):
            return rpc.remote(rref.owner_id, owner.forward_on_device, (rref, module.device, True, args, kwargs))
        result: RRef[Any] = rref.remote().__call__(*args, **kwargs)
        return result

    def stream(self, *args: object, **kwargs: object) -> Stream[Any]:
        """Run the module, a generator; return the stream of its items."""
        module, rref = self._module, self._module.module_rref
        if needs_moves(module.device):
            arguments = (rref, module.device, module.is_device_map_set, args, kwargs)
            return rpc.stream(rref.owner_id, owner.items_on_device, arguments)
        stream: Stream[Any] = rref.stream().__call__(*args, **kwargs)
        return stream

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._bound())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bound(), name)

    def _bound(self) -> MethodType:
        return MethodType(self._function, self._module)

    def __eq__(self, other: object) -> bool:
        return type(other) is ForwardMethod and self._bound() == other._bound()

    def __hash__(self) -> int:
        return hash(self._bound())

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self._module, self._name)


class _ForwardDescriptor:
    """Function of a class of remote modules that an object has as its `ForwardMethod`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, module: _Module | None, _: type | None = None) -> Any:
        return self._function if module is None else ForwardMethod(module, self._function)


def forward_method(function: Callable[..., Any]) -> Any:
    """Give the `forward` of a class the calls of a `ModuleMethod`.

    The result has no type of its own, so that subclasses may have other arguments.
    """
    return _ForwardDescriptor(function)
