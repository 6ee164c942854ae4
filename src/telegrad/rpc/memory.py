"""Tensors that are made where they are to go: in memory that two workers share."""

from collections.abc import Sequence

import torch

from telegrad.errors import NotInitialized
from telegrad.serialize.tensors import CODE_OF_DTYPE, storage_over
from telegrad.types import WorkerInfo
from telegrad.worker.default import current_worker
from telegrad.worker.scope import current

__all__ = ["empty"]

_LEAST = 32 << 10  # bytes; to borrow for less takes as long as to copy it


def empty(
    *size: int | Sequence[int],
    to: str | int | WorkerInfo | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Make an uninitialized tensor in memory that this worker shares with another.

    Built for results of handlers: write to it in place (``out=``, ``copy_``, slices), and return it, or a contiguous
    part of it. If nothing else refers to its memory then, the caller gets that memory, and nothing is copied.

    It is an ordinary tensor in every other way, and nobody else sees what is written to it. What somebody here still
    refers to when it is sent (the handler's worker keeps it, the tensor is an argument of a call, a part of it is sent
    beside another part), what goes to another worker than ``to``, or what was there when the process forked, is copied
    as always. So is a result that comes later, of a future or a coroutine.

    Where there is no such memory, it is ordinary memory, and everything works the same: the other worker is on another
    host, is reached by sockets, or has had no large tensor from this one yet; as much as ``shared_memory_bytes`` is in
    use; or the tensor has less than 32 KiB, or is quantized.

    Args:
        size: of each dimension, as for ``torch.empty``: integers, or one sequence of them.
        to: the worker that the tensor is to go to: its name, id or WorkerInfo. By default whoever made the request that
            is being handled; outside of one the tensor is in ordinary memory, so that a handler can be called directly.
        dtype: torch's default type if not given.

    Returns:
        A contiguous CPU tensor that does not require grad. Its storage cannot be resized.

    Raises:
        RuntimeError: ``to`` is given, and this process has not joined a group or there is no such worker.

    Example::

        def squares(n):  # runs on w1, for w0
            out = rpc.empty(n, n)
            return torch.outer(torch.arange(n), torch.arange(n), out=out)

        rpc.rpc_sync("w1", squares, (1000,))
    """
    shape = torch.Size(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)  # type: ignore[arg-type]
    dtype = dtype or torch.get_default_dtype()
    worker = current_worker()
    peer = -1
    if to is not None:
        if worker is None or worker.closed:
            raise NotInitialized
        peer = worker.info_of(to).id
    scope = current.get()
    connection = scope.connection if scope is not None and scope.worker is worker else 0
    nbytes = shape.numel() * dtype.itemsize
    # Other types, and sizes that make no sense, are torch's business.
    plain = dtype in CODE_OF_DTYPE and min(shape, default=0) >= 0
    if worker is not None and (connection or peer >= 0) and plain:
        most = worker.options.shared_memory_bytes
        lent = worker.engine.lend(peer, connection, nbytes) if _LEAST <= nbytes <= most else None
        if lent is not None:
            tensor = torch.empty(0, dtype=dtype, device="cpu")
            tensor.set_(storage_over(lent), 0, shape)  # type: ignore[call-overload]  # contiguous without strides
            return tensor
    return torch.empty(shape, dtype=dtype, device="cpu")
