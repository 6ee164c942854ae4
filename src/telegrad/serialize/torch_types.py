"""Reducers of torch objects that pickle does not support, or supports badly."""

import importlib
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

from telegrad.errors import DeviceNotMapped, SerializationError
from telegrad.serialize.tensor_layout import memory_of

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]

CPU_ONLY = (
    "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU before sending them"
    " over RPC, as with `tensor.cpu()`. Device maps have no effect in Telegrad yet. Found a tensor on device: {}"
)

NO_GRADIENT = (
    "a {} that requires grad cannot be sent where calls are recorded for a backward pass: its class has its own"
    " dispatch or reduction, and its gradient would not come back. Send its parts, which are plain tensors, and make it"
    " of them on the other worker, as functions given to rpc.register_type can; or send it detached."
)
NO_NESTED_GRADIENT = (
    "a nested tensor that requires grad cannot be sent where calls are recorded for a backward pass: its gradient would"
    " not come back. Send its parts, as of `unbind()`, and make it of them on the other worker; or send it detached."
)
NO_LAYOUT = "cannot send a tensor of layout {}: send its `to_dense()`."

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def reduce_special_tensor(tensor: torch.Tensor) -> Reduced:
    """Reduce a tensor that is more than elements in CPU memory.

    Its dense parts are plain tensors, which are sent out of band.
    """
    if tensor.device.type not in ("cpu", "meta"):
        raise DeviceNotMapped(CPU_ONLY.format(tensor.device))
    if tensor.layout is torch.strided and not tensor.is_nested and (tensor.is_conj() or tensor.is_neg()):
        memory_of(tensor)  # torch would read past the end of a storage that is too small
        # Materialize lazy conjugation and negation.
        plain = tensor.detach().resolve_conj().resolve_neg()
        return (_require_grad, (plain,)) if tensor.requires_grad else (_as_is, (plain,))
    if tensor.layout is torch.strided and tensor.is_cpu and not (tensor.is_nested or tensor.is_quantized):
        return _reduce_by_bytes(tensor)
    if tensor.layout not in (torch.strided, *_SPARSE):
        raise SerializationError(NO_LAYOUT.format(tensor.layout))
    if tensor.requires_grad and (tensor.layout is not torch.strided or tensor.is_nested):
        return _require_grad, (tensor.detach(),)  # torch's own reduction would lose it
    if tensor.layout in _SPARSE and tensor.device.type == "cpu" and not tensor.is_nested:
        return _reduce_sparse(tensor)
    if tensor.is_quantized and tensor.dtype in _QUANTIZED and tensor.qscheme() in _SCHEMES:
        return _reduce_quantized(tensor)
    reduced: Reduced = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    return reduced


def reduce_parameter(parameter: torch.nn.Parameter) -> Reduced:
    """Reduce a parameter as torch does, to a tensor with the parameter's version.

    Torch uses `parameter.data`, which does not count the parameter's changes: see csrc/python/tensor_versions.h.
    """
    function, (_, *rest) = parameter.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    return function, (parameter.detach(), *rest)


def bare_parameters(value: object) -> frozenset[int]:
    """Return the ids of parameters that only tuples, lists and dicts contain.

    Subclasses of these count as well.
    """
    found: set[int] = set()
    seen: set[int] = set()
    left: list[Any] = [value]
    while left:
        item = left.pop()
        if type(item) is torch.nn.Parameter:
            found.add(id(item))
        elif isinstance(item, (tuple, list, dict)) and id(item) not in seen:
            seen.add(id(item))
            left += item.values() if isinstance(item, dict) else item
    return frozenset(found)


def is_plain_subclass(tensor: torch.Tensor) -> bool:
    """Return whether a tensor requires grad and its subclass only adds attributes."""
    kind = type(tensor)
    return (
        tensor.requires_grad
        and not isinstance(tensor, torch.nn.Parameter)
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and kind.__reduce_ex__ is torch.Tensor.__reduce_ex__
        and kind.__reduce__ is torch.Tensor.__reduce__
        and kind.__getstate__ is torch.Tensor.__getstate__
        and kind.__setstate__ is torch.Tensor.__setstate__
    )


def reduce_subclass(tensor: torch.Tensor) -> Reduced:
    """Reduce to a plain tensor, which gets gradients, and the class.

    Torch's own reduction would make it a leaf.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        plain = tensor.as_subclass(torch.Tensor)
    return _as_subclass, (plain, type(tensor), dict(tensor.__dict__))


def _reduce_by_bytes(tensor: torch.Tensor) -> Reduced:
    """Reduce a tensor to a view of bytes: for element types without a code."""
    memory = memory_of(tensor)
    flat = torch.empty(0, dtype=torch.uint8).set_(memory.storage, memory.offset, (memory.nbytes,), (1,))
    return _view_bytes, (flat, memory.dtype, memory.shape, memory.strides)


def _reduce_sparse(tensor: torch.Tensor) -> Reduced:
    """Reduce a sparse tensor to its dense parts.

    Tensors rebuilt by torch's own reduction are never freed: torch keeps them in a list that torch.load checks.
    """
    if tensor.layout is torch.sparse_coo:
        return _sparse_coo, (tensor._indices(), tensor._values(), tuple(tensor.shape), tensor.is_coalesced())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        index = tensor.crow_indices(), tensor.col_indices()
    else:
        index = tensor.ccol_indices(), tensor.row_indices()
    return _sparse_compressed, (*index, tensor.values(), tuple(tensor.shape), tensor.layout)


_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32)
_PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)
_SCHEMES = (*_PER_TENSOR, torch.per_channel_affine, torch.per_channel_symmetric)


def _reduce_quantized(tensor: torch.Tensor) -> Reduced:
    """Reduce a quantized tensor to its integers and scales.

    Torch's own reduction would warn on the receiver about a deprecated class that torch itself uses.
    """
    memory_of(tensor)  # torch would read past the end of a storage that is too small
    if tensor.qscheme() in _PER_TENSOR:
        return torch._make_per_tensor_quantized_tensor, (tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point())
    scales, zeros, axis = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis()
    return torch._make_per_channel_quantized_tensor, (tensor.int_repr(), scales, zeros, axis)


def reduce_untyped_storage(storage: torch.UntypedStorage) -> Reduced:
    """Reduce a storage to a tensor of its bytes.

    So it is sent out of band and stays shared with the tensors that use it.
    """
    if storage.device.type != "cpu":
        raise DeviceNotMapped(CPU_ONLY.format(storage.device))
    return _storage_of, (torch.empty(0, dtype=torch.uint8).set_(storage),)


def reduce_typed_storage(storage: torch.TypedStorage) -> Reduced:
    # Not .untyped(), which would warn the user about a deprecated class that torch itself uses.
    return _typed_storage, (storage._untyped_storage, storage.dtype)


def reduce_script_module(module: torch.jit.ScriptModule) -> Reduced:
    file = io.BytesIO()
    torch.jit.save(module, file)
    return _load_script_module, (pickle.PickleBuffer(file.getbuffer()),)


def reduce_script_function(function: Any) -> Reduced:
    """Reduce a scripted function to its name; the receiver compiles its own."""
    _, *names, name = function.qualified_name.split(".")  # __torch__.package.module.function
    module_name = ".".join(names) or "__main__"
    if _find(module_name, name) is not function:
        raise SerializationError(
            f"cannot pickle the scripted function {function.qualified_name}: module {module_name} does not have it."
            " Define scripted functions at the top level of a module that caller and callee import."
        )
    return _find, (module_name, name)


def reduce_operator(operator: Any) -> Reduced:
    """Reduce an operator, such as ``torch.ops.aten.mul.Tensor``, to its name."""
    if isinstance(operator, torch._ops.OpOverload):
        return getattr, (operator.overloadpacket, operator._overloadname)
    return _operator, (operator._qualified_op_name,)


def reduce_future(_future: object) -> Reduced:
    raise SerializationError("Can not pickle torch.futures.Future")


def _find(module_name: str, name: str) -> object:
    return getattr(importlib.import_module(module_name), name, None)


def _operator(name: str) -> object:
    namespace, _, name = name.partition("::")
    return getattr(getattr(torch.ops, namespace), name)


def _as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _require_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_(True)


def _as_subclass(plain: torch.Tensor, kind: type[torch.Tensor], attributes: dict[str, object]) -> torch.Tensor:
    with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        tensor = plain.as_subclass(kind)
    tensor.__dict__.update(attributes)
    return tensor


def _sparse_coo(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], coalesced: bool) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=True)


def _sparse_compressed(
    first: torch.Tensor, second: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], layout: torch.layout
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(first, second, values, shape, layout=layout, check_invariants=True)


def _view_bytes(
    flat: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype)
    return tensor.set_(flat.untyped_storage(), flat.storage_offset() // tensor.element_size(), shape, strides)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _load_script_module(saved: Any) -> torch.jit.ScriptModule:
    module: torch.jit.ScriptModule = torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]
    return module


REDUCERS: dict[type, Callable[[Any], Reduced]] = {
    torch.UntypedStorage: reduce_untyped_storage,
    torch.TypedStorage: reduce_typed_storage,
    torch.futures.Future: reduce_future,
    torch._C.Future: reduce_future,
    torch.jit.ScriptFunction: reduce_script_function,
    torch._ops.OpOverload: reduce_operator,
    torch._ops.OpOverloadPacket: reduce_operator,
}
