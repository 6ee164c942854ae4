"""The pickler of ``torch.distributed.rpc.internal``, for programs that use or extend it.

Calls normally go through :mod:`telegrad.serialize`. This pickler has the form that torch's has
(plain bytes and a table of tensors), because programs derive from it, register reducers with it,
and put their own in its place with ``rpc.api._use_rpc_pickler``.
"""

import copyreg
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch

from telegrad.observe import call_key

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]

_tables = threading.local()  # .send and .recv: the table of the message being pickled in this thread

_NOT_FOUND = """ Default RPC pickler does not serialize
            function code. Ensure that UDFs are defined on both caller and
            callee modules."""


class RPCExecMode(Enum):
    """In which way a function is called remotely."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A call as it is pickled."""

    func: Any
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """An exception as torch sends it. Telegrad sends more, see :mod:`telegrad.serialize.exceptions`."""

    msg: str
    exception_type: type[BaseException]


@contextmanager
def _table(name: str, content: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Makes a table the current one of this thread; pickling within pickling gets one of its own."""
    outer = getattr(_tables, name, None)
    setattr(_tables, name, content)
    try:
        yield content
    finally:
        setattr(_tables, name, outer)


class _InternalRPCPickler:
    """Pickles to bytes and a list of tensors. Subclasses may override the reducers and both public methods."""

    def __init__(self) -> None:
        self._dispatch_table: dict[type, Callable[..., Any]] = dict(copyreg.dispatch_table)
        self._dispatch_table[torch.Tensor] = self._tensor_reducer
        self._class_reducer_dict: dict[type, Callable[..., Any]] = {}

    def _register_reducer(self, obj_class: type, reducer: Callable[..., Any]) -> None:
        """Pickles objects of a class (not of its subclasses) by this reducer. The first one registered stays."""
        self._class_reducer_dict.setdefault(obj_class, reducer)

    @classmethod
    def _tensor_receiver(cls, tensor_index: int) -> torch.Tensor:
        tensor: torch.Tensor = _tables.recv[tensor_index]
        return tensor

    def _tensor_reducer(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        _tables.send.append(tensor)
        return _InternalRPCPickler._tensor_receiver, (len(_tables.send) - 1,)

    @classmethod
    def _py_rref_receiver(cls, rref_fork_data: Any) -> Any:
        from telegrad.rpc.api import PyRRef

        return PyRRef._deserialize(rref_fork_data)

    def _py_rref_reducer(self, py_rref: Any) -> tuple[Any, ...]:
        return _InternalRPCPickler._py_rref_receiver, (py_rref._serialize(),)

    def _rref_reducer(self, rref: Any) -> tuple[Any, ...]:
        return self._py_rref_reducer(rref)

    @classmethod
    def _script_module_receiver(cls, script_module_serialized: bytes) -> Any:
        return torch.jit.load(io.BytesIO(script_module_serialized))  # type: ignore[no-untyped-call]

    def _script_module_reducer(self, script_module: Any) -> tuple[Any, ...]:
        f = io.BytesIO()
        torch.jit.save(script_module, f)
        return _InternalRPCPickler._script_module_receiver, (f.getvalue(),)

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Bytes, and the tensors that they refer to by index."""
        from telegrad.rpc.api import PyRRef, RRef

        table = {**self._dispatch_table, PyRRef: self._py_rref_reducer, RRef: self._rref_reducer}
        if isinstance(obj, torch.jit.ScriptModule):
            table[type(obj)] = self._script_module_reducer
        f = io.BytesIO()
        pickler = pickle.Pickler(f)
        pickler.dispatch_table = {**table, **self._class_reducer_dict}
        with _table("send", []) as tensors:
            pickler.dump(obj)
        return f.getvalue(), tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """The object again. If a function or class is not found, an ``AttributeError`` is *returned*, as in torch."""
        with _table("recv", tensor_table):
            try:
                return pickle.loads(binary_data)
            except AttributeError as e:
                missing = AttributeError(str(e) + _NOT_FOUND)
                missing.__cause__ = e
                return missing


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Pickles with the default pickler."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Unpickles with the default pickler."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """The name under which a call appears in a profile."""
    return call_key(exec_type.value, func_name, current_worker_name, dst_worker_name)
