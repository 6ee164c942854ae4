"""A worker of a map, and the size of its chunks."""

from telegrad.rpc.chunks import Reply
from telegrad.rpc.map_items import COPIED, SMALL, nbytes
from telegrad.serialize.copies import IMMUTABLE
from telegrad.types import WorkerInfo

__all__ = ["CHUNK_BYTES", "CHUNK_TIME", "GROWTH", "MOST_DEFERRED", "MOST_ITEMS", "Callee"]

CHUNK_TIME = 1_500_000  # ns that a chunk aims at: a message and the wake of a thread are then a few percent
CHUNK_BYTES = 4 << 20  # the copy of that many bytes takes about as long
MOST_ITEMS = 8192  # of a chunk; more would not be faster, and the first result of a chunk comes with its last
MOST_DEFERRED = 64  # coroutines or futures of a chunk: all run at once, and share the connections that they use
GROWTH = 4  # most times that a chunk has the items of the one before: the items may differ


class Callee:
    """Worker that runs chunks."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info: WorkerInfo = info
        self.running: int = 0  # chunks
        self.size: int = 1  # items of the next chunk
        self.lost: bool = False

    def adapt(self, reply: Reply) -> None:
        """Set the size of the next chunk by the duration of one."""
        results, duration, _ = reply
        count = len(results)
        if not count:
            return
        size, most = GROWTH * count, MOST_ITEMS
        if duration is None:
            most = MOST_DEFERRED
        else:
            size = min(size, CHUNK_TIME * count // max(duration, 1))
        if type(results[-1]) not in SMALL:
            bytes_each = max(nbytes(results[-1]), 1)
            is_copied = type(results[-1]) not in IMMUTABLE
            size = 1 if is_copied and bytes_each > COPIED else min(size, CHUNK_BYTES // bytes_each)
        self.size = max(1, min(size, most))
