"""The pickler of ``torch.distributed.rpc.internal``, for programs that use or extend it.

Calls normally go through :mod:`telegrad.serialize`. This pickler has the form that torch's has
(plain bytes and a table of tensors), because programs derive from it, register reducers with it,
and put their own in its place with ``rpc.api._use_rpc_pickler``.
"""

import copyreg
import io
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch

from telegrad.observe import call_key

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]

_thread_local_tensor_tables = threading.local()  # .send_tables, .recv_tables: of the message that the thread pickles
_pickler = pickle.Pickler
_unpickler = pickle.Unpickler

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
    outer = getattr(_thread_local_tensor_tables, name, None)
    setattr(_thread_local_tensor_tables, name, content)
    try:
        yield content
    finally:
        setattr(_thread_local_tensor_tables, name, outer)


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
        tensor: torch.Tensor = _thread_local_tensor_tables.recv_tables[tensor_index]
        return tensor

    def _tensor_reducer(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        tensors = _thread_local_tensor_tables.send_tables
        tensors.append(tensor)
        return _InternalRPCPickler._tensor_receiver, (len(tensors) - 1,)

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
        pickler = _pickler(f)
        pickler.dispatch_table = {**table, **self._class_reducer_dict}
        with _table("send_tables", []) as tensors:
            pickler.dump(obj)
        return f.getvalue(), tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """The object again. If a function or class is not found, an ``AttributeError`` is *returned*, as in torch."""
        with _table("recv_tables", tensor_table):
            try:
                return _unpickler(io.BytesIO(binary_data)).load()
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


def _run_function(python_udf: Any) -> Any:
    """Runs a call that has been unpickled; what it raises is returned as a `RemoteException`. For programs that ship
    pickled calls by means of their own: Telegrad's calls do not go through it."""
    from telegrad.rpc import api

    try:
        if isinstance(python_udf, AttributeError):
            raise python_udf
        return python_udf.func(*python_udf.args, **python_udf.kwargs)
    except Exception as e:
        where = api._get_current_rpc_agent().get_worker_info()
        return RemoteException(f"On {where}:\n{e!r}\n{traceback.format_exc()}", type(e))


def _handle_exception(result: Any) -> None:
    """Raises the exception that `_run_function` has returned, if it has returned one."""
    if not isinstance(result, RemoteException):
        return
    try:
        error = result.exception_type(result.msg)
    except BaseException as e:
        raise RuntimeError(
            f"Failed to create original exception type. Error msg was {e} Original exception on remote side was"
            f" {result.msg}"
        ) from e
    raise error
