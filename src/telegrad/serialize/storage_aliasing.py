"""Segments of the tensors of one message, with storage aliasing preserved.

Tensors that share memory on the sender share it on the receiver too, and a view is sent without the rest of its base.
For this the tensors of each storage are grouped into *alias sets*: disjoint intervals of memory. An alias set is one
segment. Alias sets of one storage may be sent separately, because writes to one are not visible in another.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from telegrad.serialize.cut_graphs import is_watched, watch_cut
from telegrad.serialize.tensor_layout import (
    CODE_OF_DTYPE,
    DTYPE_OF_CODE,
    Buffer,
    TensorMemory,
    memory_of,
    storage_over,
)

Segment: TypeAlias = tuple[int, int, object]  # address, size in bytes, owner of the memory

NO_MEMORY = -1
# Bytes. If an alias set begins at a multiple of this, offsets in it are multiples of each tensor's element size.
LARGEST_ELEMENT = 16


class TensorSlot(NamedTuple):
    """Description of one tensor for the receiver."""

    dtype_code: int
    requires_grad: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    segment: int  # index of the tensor segment in the message, or NO_MEMORY
    offset: int  # of the first element in the segment, in elements
    graph_cut: bool = False  # it requires grad and its graph is not sent, because the message is not recorded


class _Member(NamedTuple):
    """Tensor of an alias set."""

    number: int  # index among the message's tensors
    tensor: torch.Tensor
    memory: TensorMemory

    @property
    def begin(self) -> int:
        """Address of the first element."""
        return self.memory.address

    @property
    def end(self) -> int:
        """Address past the last element."""
        return self.memory.address + self.memory.nbytes


def place(tensors: Sequence[torch.Tensor], *, recorded: bool = False) -> tuple[list[TensorSlot], list[Segment]]:
    """Assign each tensor to a segment.

    Args:
        tensors: Plain tensors, see `telegrad.serialize.tensor_layout.is_plain`.
        recorded: Tensors that require grad get a segment each. They arrive as outputs of one autograd function, which
            cannot detect that writing to one of them changes another.

    Returns:
        A place for each tensor, and the segments.

    Raises:
        SerializationError: A tensor does not have the memory of its elements.
    """
    places: dict[int, TensorSlot] = {}
    segments: list[Segment] = []
    by_storage: dict[int, list[_Member]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        memory = memory_of(tensor)
        member = _Member(index, tensor, memory)
        if not memory.nbytes:
            places[index] = _placed(member, memory, NO_MEMORY, 0)
        elif recorded and tensor.requires_grad:
            _send_separately([member], places, segments)
        else:
            by_storage[memory.address - memory.offset].append(member)
    for base, members in by_storage.items():
        for aliases in _alias_sets(members):
            _send_alias_set(aliases, base, places, segments)
    return [places[index] for index in range(len(tensors))], segments


def restore(places: Sequence[TensorSlot], segments: Sequence[Buffer], *, recorded: bool = False) -> list[torch.Tensor]:
    """Make the tensors that were passed to `place`, with `segments` as their memory.

    Args:
        places: One place for each tensor.
        segments: Writable buffers.
        recorded: Make all tensors without requires_grad.

    Raises:
        TypeError: This version of torch does not have an element type.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    tensors = []
    for code, requires_grad, shape, strides, segment, offset, graph_cut in places:
        dtype = DTYPE_OF_CODE.get(code)
        if dtype is None:
            raise TypeError(f"this version of torch ({torch.__version__}) has no tensor type with code {code}")
        if segment == NO_MEMORY:
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        else:
            if segment not in storages:
                storages[segment] = storage_over(segments[segment])
            tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storages[segment], offset, shape, strides)
        if requires_grad and not recorded:
            tensor.requires_grad_(True)
            if graph_cut:
                watch_cut(tensor)
        tensors.append(tensor)
    return tensors


def _placed(member: _Member, memory: TensorMemory, segment: int, offset: int) -> TensorSlot:
    tensor = member.tensor
    graph_cut = tensor.requires_grad and (not tensor.is_leaf or is_watched(tensor))
    code = CODE_OF_DTYPE[memory.dtype]
    return TensorSlot(code, tensor.requires_grad, memory.shape, memory.strides, segment, offset, graph_cut)


def _alias_sets(members: list[_Member]) -> list[list[_Member]]:
    members.sort(key=lambda member: member.begin)
    sets: list[list[_Member]] = []
    end = 0
    for member in members:
        if member.begin >= end:
            sets.append([])
        sets[-1].append(member)
        end = max(end, member.end)
    return sets


def _send_alias_set(aliases: list[_Member], base: int, places: dict[int, TensorSlot], segments: list[Segment]) -> None:
    if len({(m.begin, m.memory.dtype, m.memory.shape, m.memory.strides) for m in aliases}) == 1:
        _send_separately(aliases, places, segments)
        return
    begin = base + (aliases[0].begin - base) // LARGEST_ELEMENT * LARGEST_ELEMENT
    nbytes = max(member.end for member in aliases) - begin
    useful = sum(math.prod(member.memory.shape) * member.memory.dtype.itemsize for member in aliases)
    if nbytes > 2 * useful and not _share_elements(aliases):  # for example columns of a matrix
        for member in aliases:
            _send_separately([member], places, segments)
        return
    for member in aliases:
        offset = (member.begin - begin) // member.memory.dtype.itemsize
        places[member.number] = _placed(member, member.memory, len(segments), offset)
    segments.append((begin, nbytes, _owner(aliases[0].memory.storage, aliases)))


def _send_separately(aliases: list[_Member], places: dict[int, TensorSlot], segments: list[Segment]) -> None:
    """Add a segment for one tensor, or for several with the same elements in order."""
    memory = aliases[0].memory.dense()
    for member in aliases:
        places[member.number] = _placed(member, memory, len(segments), 0)
    segments.append((memory.address, memory.nbytes, _owner(memory.storage, aliases)))


def _owner(storage: object, members: list[_Member]) -> tuple[object, ...]:
    """Return an owner with the version counters of the tensors.

    They may differ between tensors of one storage. The owner keeps no graph alive.
    """
    return storage, *(m.tensor.detach() if m.tensor.requires_grad else m.tensor for m in members)


def _share_elements(aliases: list[_Member]) -> bool:
    """Return whether some byte belongs to two of the tensors.

    The intervals of the tensors overlap, but their elements may be disjoint.
    """
    sizes = {member.memory.dtype.itemsize for member in aliases}
    if len(sizes) > 1:
        return True  # assumed: comparing elements of different sizes is not worth the cost
    addresses = []
    for member in aliases:
        _, shape, strides, *_ = memory = member.memory
        offsets = torch.zeros(1, dtype=torch.int64)
        for size, stride in zip(shape, strides, strict=True):
            if stride:  # an expanded dimension visits the same elements again
                offsets = (offsets[:, None] + torch.arange(size) * (stride * memory.dtype.itemsize)).flatten()
        addresses.append(torch.unique(offsets) + (member.begin - aliases[0].begin))
    every = torch.cat(addresses)
    return bool(torch.unique(every).numel() < every.numel())
