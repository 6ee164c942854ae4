"""Pickler of ``torch.distributed.rpc.internal``, which programs use or extend.

Calls normally go through :mod:`telegrad.serialize`. This pickler has torch's form (plain bytes and a table of tensors),
because programs derive from it, register reducers with it, and replace it with ``rpc.api._use_rpc_pickler``.
"""

import copyreg
import io
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Final, NamedTuple

import torch

from telegrad.observe import call_key
from telegrad.rref import RRef
from telegrad.serialize.program_pickler import BodyPickler
from telegrad.serialize.unpickling import OPEN, PickleGate, Unpickler
from telegrad.worker.default_worker import current_worker, open_worker

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]

_thread_local_tensor_tables = threading.local()  # .send_tables, .recv_tables of the message being pickled
_pickler = pickle.Pickler
_unpickler = Unpickler

_NOT_FOUND = """ Default RPC pickler does not serialize
            function code. Ensure that UDFs are defined on both caller and
            callee modules."""


class RPCExecMode(Enum):
    """Kind of remote call."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """Call in the form in which it is pickled."""

    func: Any
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """Exception in torch's form.

    Telegrad's own calls send more, see :mod:`telegrad.serialize.exceptions`.
    """

    msg: str
    exception_type: type[BaseException]


@contextmanager
def _table(name: str, content: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Make a table the thread's current one. Nested pickling gets its own table."""
    outer = getattr(_thread_local_tensor_tables, name, None)
    setattr(_thread_local_tensor_tables, name, content)
    try:
        yield content
    finally:
        setattr(_thread_local_tensor_tables, name, outer)


class _InternalRPCPickler:
    """Pickler to bytes and a list of tensors.

    Subclasses may override the reducers and both public methods.
    """

    def __init__(self) -> None:
        self._dispatch_table: dict[type, Callable[..., object]] = dict(copyreg.dispatch_table)
        self._dispatch_table[torch.Tensor] = self._tensor_reducer
        self._class_reducer_dict: dict[type, Callable[..., Any]] = {}

    def _register_reducer(self, obj_class: type, reducer: Callable[..., object]) -> None:
        """Register a reducer for a class, without its subclasses. The first one wins."""
        self._class_reducer_dict.setdefault(obj_class, reducer)

    @classmethod
    def _tensor_receiver(cls, tensor_index: int) -> torch.Tensor:
        tensor: torch.Tensor = _thread_local_tensor_tables.recv_tables[tensor_index]
        return tensor

    def _tensor_reducer(self, tensor: torch.Tensor) -> tuple[object, ...]:
        tensors = _thread_local_tensor_tables.send_tables
        tensors.append(tensor)
        return _InternalRPCPickler._tensor_receiver, (len(tensors) - 1,)

    @classmethod
    def _py_rref_receiver(cls, rref_fork_data: Any) -> Any:
        return RRef._deserialize(rref_fork_data)

    def _py_rref_reducer(self, py_rref: Any) -> tuple[Any, ...]:
        return _InternalRPCPickler._py_rref_receiver, (py_rref._serialize(),)

    def _rref_reducer(self, rref: object) -> tuple[object, ...]:
        return self._py_rref_reducer(rref)

    @classmethod
    def _script_module_receiver(cls, script_module_serialized: bytes) -> object:
        return torch.jit.load(io.BytesIO(script_module_serialized))  # type: ignore[no-untyped-call]

    def _script_module_reducer(self, script_module: object) -> tuple[object, ...]:
        f = io.BytesIO()
        torch.jit.save(script_module, f)
        return _InternalRPCPickler._script_module_receiver, (f.getvalue(),)

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Return the object as bytes, and the tensors that they refer to by index."""
        table: dict[type, Callable[..., Any]] = {**self._dispatch_table, RRef: self._rref_reducer}
        if isinstance(obj, torch.jit.ScriptModule):
            table[type(obj)] = self._script_module_reducer
        f = io.BytesIO()
        pickler = _pickler(f)
        pickler.dispatch_table = {**table, **self._class_reducer_dict}
        with _table("send_tables", []) as tensors:
            pickler.dump(obj)
        return f.getvalue(), tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """Return the object.

        If a function or class is not found, an ``AttributeError`` is *returned*, as in torch.
        """
        with _table("recv_tables", tensor_table):
            try:
                return _unpickler(io.BytesIO(binary_data), gate=_gate(), what="a call or result").load()
            except AttributeError as e:
                missing = AttributeError(str(e) + _NOT_FOUND)
                missing.__cause__ = e
                return missing


def _gate() -> PickleGate:
    """Return the permission of this worker to load pickles."""
    worker = current_worker()
    return OPEN if worker is None else worker.messages.gate


_internal_rpc_pickler = _InternalRPCPickler()


TORCH_PICKLER: Final = "torch.distributed.rpc.internal"  # no class of a program has this name


class TorchPickler(BodyPickler):
    """Pickler of torch's form: encodes calls with their functions, but no results."""

    carries_function = True

    @property
    def name(self) -> str:
        """Name of the default pickler, which decodes the messages on every worker."""
        return TORCH_PICKLER

    def call(self, function: object, args: object, kwargs: object) -> object:
        """Return a call as torch's pickler gets it."""
        return PythonUDF(function, args, kwargs)

    def items(self, value: Any) -> tuple[Any, ...]:
        """Return function and arguments.

        Raises:
            AttributeError: The default pickler has not found a function or class.
        """
        if isinstance(value, AttributeError):
            raise value
        return tuple(value)


def serialize(obj: object) -> tuple[bytes, list[torch.Tensor]]:
    """Pickle with the default pickler."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Unpickle with the default pickler."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Return the name under which a call appears in a profile."""
    return call_key(exec_type.value, func_name, current_worker_name, dst_worker_name)


def _run_function(python_udf: Any) -> Any:
    """Run an unpickled call; return an exception as a `RemoteException`.

    For programs that send pickled calls by their own means. Telegrad's calls do not use it.
    """
    try:
        if isinstance(python_udf, AttributeError):
            raise python_udf
        return python_udf.func(*python_udf.args, **python_udf.kwargs)
    except Exception as e:
        return RemoteException(f"On {open_worker().info}:\n{e!r}\n{traceback.format_exc()}", type(e))


def _handle_exception(result: object) -> None:
    """Raise the exception that `_run_function` returned, if there is one."""
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
