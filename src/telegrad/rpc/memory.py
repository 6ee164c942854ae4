"""Tensors allocated in memory that two workers share."""

from collections.abc import Sequence

import torch

from telegrad.errors import NotInitialized
from telegrad.serialize.tensor_layout import CODE_OF_DTYPE, storage_over
from telegrad.types import WorkerInfo
from telegrad.worker.default_worker import current_worker
from telegrad.worker.scope import current

__all__ = ["empty"]

_LEAST = 32 << 10  # bytes; copying less is as fast as allocating shared memory for it


def empty(
    *size: int | Sequence[int],
    to: str | int | WorkerInfo | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Make an uninitialized tensor in memory that this worker shares with another.

    For results of handlers: write to it in place (``out=``, ``copy_``, slices), and return it, or a contiguous part of
    it. If nothing else refers to its memory by then, the caller gets that memory without a copy.

    In every other way it is an ordinary tensor, and no other worker sees what is written to it. It is copied as usual
    if this process still refers to it when it is sent: the handler's worker keeps it, it is an argument of a call, or a
    part of it is sent alongside another part. It is also copied if it goes to a worker other than ``to``, if the
    process has forked since, or if the result is deferred (of a future or a coroutine).

    Without such memory the tensor is in ordinary memory, and everything works the same. That is so if the other worker
    is on another host, is reached by sockets, or has had no large tensor from this one yet; if ``shared_memory_bytes``
    are in use; or if the tensor has less than 32 KiB or is quantized.

    Args:
        size: of each dimension, as for ``torch.empty``: integers, or one sequence of them.
        to: the worker that will get the tensor: its name, id or WorkerInfo. By default the caller of the request being
            handled. Outside of a handler the tensor is in ordinary memory, so that a handler can be called directly.
        dtype: torch's default type if not given.

    Returns:
        A contiguous CPU tensor that does not require grad. Its storage cannot be resized.

    Raises:
        RuntimeError: ``to`` is given, and this process has not joined a group or there is no such worker.

    Example::

        def squares(n):  # runs on worker1, for worker0
            out = rpc.empty(n, n)
            return torch.outer(torch.arange(n), torch.arange(n), out=out)

        rpc.rpc_sync("worker1", squares, args=(1000,))
    """
    shape = torch.Size(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)  # type: ignore[arg-type]
    dtype = dtype or torch.get_default_dtype()
    worker = current_worker()
    peer = -1
    if to is not None:
        if worker is None or worker.closed:
            raise NotInitialized
        peer = worker.members.resolve(to).id
    scope = current.get()
    connection = scope.connection if scope is not None and scope.worker is worker else 0
    nbytes = shape.numel() * dtype.itemsize
    # Torch handles other types, and reports invalid sizes.
    plain = dtype in CODE_OF_DTYPE and min(shape, default=0) >= 0
    if worker is not None and (connection or peer >= 0) and plain:
        most = worker.options.shared_memory_bytes
        lent = worker.engine.lend(peer, connection, nbytes) if _LEAST <= nbytes <= most else None
        if lent is not None:
            tensor = torch.empty(0, dtype=dtype, device="cpu")
            tensor.set_(storage_over(lent), 0, shape)  # type: ignore[call-overload]  # contiguous without strides
            return tensor
    return torch.empty(shape, dtype=dtype, device="cpu")
