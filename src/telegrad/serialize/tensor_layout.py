"""Encoding and decoding of tensors for the codec through torch's public API.

If torch provides its C function table (`torch.Tensor.__dlpack_c_exchange_api__`), the compiled codec uses it, and calls
this module only for tensors that the table does not support. On an older torch this module handles every tensor.
"""

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.autograd import forward_ad

from telegrad import _core
from telegrad.errors import Overloaded, SerializationError
from telegrad.serialize.cut_graphs import is_watched, watch_cut

Buffer: TypeAlias = Any  # object with a writable buffer; from Python 3.12 on this is collections.abc.Buffer
Body: TypeAlias = bytes | bytearray | memoryview  # of a message

# dtype code, requires_grad, shape, strides in elements, address, size in bytes, owner of the memory
Described: TypeAlias = tuple[int, bool, tuple[int, ...], tuple[int, ...], int, int, object]
# dtype code, requires_grad, shape, strides in elements
Meta: TypeAlias = tuple[int, bool, tuple[int, ...], tuple[int, ...]]

DTYPE_OF_CODE: dict[int, torch.dtype] = {
    code: getattr(torch, name) for code, name in _core.tensor_dtypes() if hasattr(torch, name)
}
CODE_OF_DTYPE: dict[torch.dtype, int] = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}


IN_TRANSFORM = (
    "a tensor of a torch.func transform (grad, vmap, jacrev, ...) cannot be sent to another worker: it has no memory of"
    " its own. Make the call outside of the transform, or run the transform in a function on the other worker."
)

IN_DUAL_LEVEL = (
    "a tensor with a tangent of forward-mode differentiation (torch.autograd.forward_ad.make_dual, strategy="
    "'forward-mode') cannot be sent to another worker: its tangent would be lost. Make the call outside of the dual"
    " level, or run the differentiation in a function on the other worker."
)

SMALL_SPAN = 8 << 10
"""Bytes up to which a non-dense tensor is sent with its gaps, which keeps its strides, as in torch."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is only elements in CPU memory, of a type with a code."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_nested
        and tensor.dtype in CODE_OF_DTYPE
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


# The second one knows those of `is_grads_batched`.
_transform_checks: list[Callable[[torch.Tensor], bool]] = [
    getattr(torch._C._functorch, name)
    for name in ("is_functorch_wrapped_tensor", "is_legacy_batchedtensor")
    if hasattr(getattr(torch._C, "_functorch", None), name)
]


def is_of_transform(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is the wrapper of a torch.func transform."""
    return any(check(tensor) for check in _transform_checks)


def in_dual_level() -> bool:
    """Return whether tensors of this process may have tangents."""
    return forward_ad._current_level >= 0


def refuse_tangent(tensor: torch.Tensor) -> None:
    """Raise RuntimeError if `tensor` has a tangent in the dual level that is active.

    Only strided tensors of classes without a dispatch of their own can have one.
    """
    if not in_dual_level() or tensor.layout is not torch.strided or tensor.is_nested:
        return
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return
    if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        raise RuntimeError(IN_DUAL_LEVEL)


class TensorMemory(NamedTuple):
    """Memory of a strided CPU tensor at one moment, within `storage`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    address: int  # of the first element
    nbytes: int  # from the first element to past the last one
    storage: torch.UntypedStorage
    offset: int  # bytes of the storage before the first element

    def view(self) -> torch.Tensor:
        """Return a tensor over this memory, whatever memory the tensor gets meanwhile."""
        first = self.offset // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(self.storage, first, self.shape, self.strides)

    def dense(self) -> "TensorMemory":
        """Return a dense copy if most of the memory is gaps; otherwise itself.

        It is if the elements span more than twice their size, and more than SMALL_SPAN.
        """
        size = math.prod(self.shape) * self.dtype.itemsize
        if self.nbytes <= max(2 * size, SMALL_SPAN):
            return self
        return memory_of(self.view().clone(memory_format=torch.contiguous_format))


_ATTEMPTS = 16  # of which one suffices, unless another thread replaces the memory between two steps of this one


def memory_of(tensor: torch.Tensor) -> TensorMemory:
    """Find the memory of a strided CPU tensor.

    Another thread may replace the memory meanwhile (`tensor.data = other`), which frees it if this was its last tensor.
    So the storage is held before the address is used, and the address must be within the storage.

    Raises:
        SerializationError: The storage is smaller than the tensor, or its memory is replaced all the time.
    """
    why = "another thread replaces its memory (by `tensor.data = ...` or `set_`) while it is sent. Send a copy of it."
    for _ in range(_ATTEMPTS):
        before = dtype, shape, strides, address = _elements_of(tensor)
        offset = tensor.storage_offset() * dtype.itemsize
        storage = tensor.untyped_storage()
        if _elements_of(tensor) != before:
            continue
        nbytes = span_of(shape, strides, dtype.itemsize)
        base, size = _bounds_of(storage)
        if nbytes == 0 or base <= address <= base + size - nbytes:
            return TensorMemory(dtype, shape, strides, address, nbytes, storage, address - base if nbytes else 0)
        if tensor._is_zerotensor():  # zeros without memory
            return memory_of(torch.zeros(shape, dtype=dtype, device="cpu"))
        if size < offset + nbytes:
            why = (
                f"its storage has {size} of {offset + nbytes} bytes. The storage was made smaller (by"
                " `untyped_storage().resize_`, as FSDP frees its parameters), or the tensor never had memory: restore"
                " it before the call, or send a tensor with memory."
            )
    raise SerializationError(f"cannot send a tensor of shape {tuple(tensor.shape)}: {why}")


def _elements_of(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.data_ptr()


def _bounds_of(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Return address and size of a storage's memory; zeros without memory."""
    try:
        address = storage.data_ptr()
    except RuntimeError:  # of a tensor of zeros without memory
        return 0, 0
    return address, storage.nbytes() if address else 0


def span_of(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes from the first element to past the last one."""
    if 0 in shape:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1) * itemsize


def encode_tensor(tensor: torch.Tensor) -> Described | None:
    """Return the description and the memory of `tensor`; None if it is not plain.

    If the elements span more than twice their own size, and more than SMALL_SPAN, the tensor is copied densely first.

    Raises:
        RuntimeError: It belongs to a transform of torch.func, or has a tangent.
        SerializationError: It does not have the memory of its elements.
    """
    if is_of_transform(tensor):
        raise RuntimeError(IN_TRANSFORM)
    refuse_tangent(tensor)
    if not is_plain(tensor):
        return None
    memory = memory_of(tensor).dense()
    code = CODE_OF_DTYPE[memory.dtype]
    # The owner is the storage, not the tensor: it survives `tensor.data = other` while the message is in flight.
    return code, tensor.requires_grad, memory.shape, memory.strides, memory.address, memory.nbytes, memory.storage


def decode_tensor(meta: Meta, segment: Buffer | None) -> torch.Tensor:
    """Make a tensor over the memory of a segment.

    Args:
        meta: Description of the tensor.
        segment: Object with a writable buffer; None for a tensor without elements.

    Raises:
        TypeError: This version of torch does not have the element type.
    """
    code, requires_grad, shape, strides = meta
    dtype = DTYPE_OF_CODE.get(code)
    if dtype is None:
        raise TypeError(f"this version of torch ({torch.__version__}) has no tensor type with code {code}")
    if segment is None:
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    else:
        tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage_over(segment), 0, shape, strides)
    return tensor.requires_grad_(True) if requires_grad else tensor


def storage_over(segment: Buffer) -> torch.UntypedStorage:
    """Make a storage over the memory of `segment`, which it keeps alive."""
    # frombuffer keeps the object but not its exported buffer; a memoryview keeps both.
    return torch.frombuffer(memoryview(segment), dtype=torch.uint8).untyped_storage()


MAX_OBJECTS: Final = 32 << 20
"""Maximum number of objects of a decoded value, unless an option says otherwise."""


def make_codec(max_depth: int = 64, max_objects: int = MAX_OBJECTS) -> _core.Codec:
    """Make a codec for the torch of this process.

    Args:
        max_depth: Maximum nesting of containers. Deeper values are pickled.
        max_objects: Maximum number of objects of a decoded value.
    """
    return _core.Codec(
        torch.Tensor,
        getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
        encode_tensor,
        decode_tensor,
        max_depth,
        byte_types=(torch.uint8, torch.int8),
        parameter_type=torch.nn.Parameter,
        watch_cut=watch_cut,
        is_watched=is_watched,
        max_objects=max_objects,
        too_many=Overloaded,
        forward_ad=vars(forward_ad),
    )
