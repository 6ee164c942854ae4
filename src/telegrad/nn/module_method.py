"""Methods of remote modules, as the program gets them from a `RemoteModule`."""

from typing import Any, Protocol

from torch import nn

from telegrad.rref import RRef
from telegrad.streams.stream import Stream
from telegrad.worker.calls.future import CallFuture

__all__ = ["ModuleMethod"]


class _Module(Protocol):
    """Part of a `RemoteModule` that its methods use."""

    module_rref: RRef[nn.Module]


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
