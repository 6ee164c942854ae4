"""Segments of the tensors of one message, with storage aliasing preserved.

Tensors that share memory on the sender share it on the receiver too, and a view is sent without the rest of its base.
For this the tensors of each storage are grouped into *alias sets*: disjoint intervals of memory. An alias set is one
segment. Alias sets of one storage may be sent separately, because writes to one are not visible in another.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from telegrad.serialize.cut_graphs import is_watched, watch_cut
from telegrad.serialize.tensor_layout import (
    CODE_OF_DTYPE,
    DTYPE_OF_CODE,
    Buffer,
    encode_tensor,
    span_of,
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

    begin: int  # address of the first element
    end: int  # address past the last one
    number: int  # index among the message's tensors
    tensor: torch.Tensor


def place(tensors: Sequence[torch.Tensor], *, recorded: bool = False) -> tuple[list[TensorSlot], list[Segment]]:
    """Assign each tensor to a segment.

    Args:
        tensors: Plain tensors, see `telegrad.serialize.tensor_layout.is_plain`.
        recorded: Tensors that require grad get a segment each. They arrive as outputs of one autograd function, which
            cannot detect that writing to one of them changes another.

    Returns:
        A place for each tensor, and the segments.
    """
    places: dict[int, TensorSlot] = {}
    segments: list[Segment] = []
    by_storage: dict[int, list[_Member]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        nbytes = span_of(tuple(tensor.shape), tensor.stride(), tensor.element_size())
        if nbytes and recorded and tensor.requires_grad:
            _send_separately([_Member(0, nbytes, index, tensor)], places, segments)
        elif nbytes:
            begin = tensor.data_ptr()
            by_storage[tensor.untyped_storage().data_ptr()].append(_Member(begin, begin + nbytes, index, tensor))
        else:
            places[index] = _placed(tensor, tensor.stride(), NO_MEMORY, 0)
    for base, members in by_storage.items():
        for island in _alias_sets(members):
            _send_alias_set(island, base, places, segments)
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


def _placed(tensor: torch.Tensor, strides: tuple[int, ...], segment: int, offset: int) -> TensorSlot:
    code = CODE_OF_DTYPE[tensor.dtype]
    graph_cut = tensor.requires_grad and (not tensor.is_leaf or is_watched(tensor))
    return TensorSlot(code, tensor.requires_grad, tuple(tensor.shape), tuple(strides), segment, offset, graph_cut)


def _alias_sets(members: list[_Member]) -> list[list[_Member]]:
    members.sort(key=lambda member: member.begin)
    islands: list[list[_Member]] = []
    end = 0
    for member in members:
        if member.begin >= end:
            islands.append([])
        islands[-1].append(member)
        end = max(end, member.end)
    return islands


def _send_alias_set(island: list[_Member], base: int, places: dict[int, TensorSlot], segments: list[Segment]) -> None:
    if len({(m.begin, m.tensor.dtype, m.tensor.shape, m.tensor.stride()) for m in island}) == 1:
        _send_separately(island, places, segments)
        return
    begin = base + (island[0].begin - base) // LARGEST_ELEMENT * LARGEST_ELEMENT
    nbytes = max(member.end for member in island) - begin
    useful = sum(member.tensor.nbytes for member in island)
    if nbytes > 2 * useful and not _share_elements(island):  # for example columns of a matrix
        for member in island:
            _send_separately([member], places, segments)
        return
    for member in island:
        offset = (member.begin - begin) // member.tensor.element_size()
        places[member.number] = _placed(member.tensor, member.tensor.stride(), len(segments), offset)
    segments.append((begin, nbytes, _owner(island[0].tensor.untyped_storage(), island)))


def _send_separately(island: list[_Member], places: dict[int, TensorSlot], segments: list[Segment]) -> None:
    """Add a segment for one tensor, or for several with the same elements in order."""
    described = encode_tensor(island[0].tensor)
    assert described is not None, "only plain tensors get here"
    _, _, _, strides, address, nbytes, owner = described
    for member in island:
        places[member.number] = _placed(member.tensor, strides, len(segments), 0)
    segments.append((address, nbytes, _owner(owner, island)))


def _owner(storage: object, members: list[_Member]) -> tuple[object, ...]:
    """Return an owner with the version counters of the tensors.

    They may differ between tensors of one storage. The owner keeps no graph alive.
    """
    return storage, *(m.tensor.detach() if m.tensor.requires_grad else m.tensor for m in members)


def _share_elements(island: list[_Member]) -> bool:
    """Return whether some byte belongs to two of the tensors.

    The intervals of the tensors overlap, but their elements may be disjoint.
    """
    sizes = {member.tensor.element_size() for member in island}
    if len(sizes) > 1:
        return True  # assumed: comparing elements of different sizes is not worth the cost
    addresses = []
    for member in island:
        offsets = torch.zeros(1, dtype=torch.int64)
        for size, stride in zip(member.tensor.shape, member.tensor.stride(), strict=True):
            if stride:  # an expanded dimension visits the same elements again
                offsets = (offsets[:, None] + torch.arange(size) * (stride * member.tensor.element_size())).flatten()
        addresses.append(torch.unique(offsets) + (member.begin - island[0].begin))
    every = torch.cat(addresses)
    return bool(torch.unique(every).numel() < every.numel())
