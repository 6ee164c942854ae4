"""A program for torch.distributed.rpc, run by torchrun as a drop-in."""

import os
import sys
from pathlib import Path

from torch.distributed import rpc

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"w{rank}", rank=rank, world_size=size)
total = [rpc.rpc_sync(f"w{other}", max, args=(rank, 0)) for other in range(size)]
assert total == [rank] * size
rpc.shutdown()
Path(sys.argv[1], f"done{rank}").write_text(f"{rpc.init_rpc.__module__} rank {rank} of {size}")
