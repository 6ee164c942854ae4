"""Program for torchrun with a varying number of nodes.

It ends once two workers have called each other after one of them was alone. Arguments: the folder in which each worker
records how far it is, and the name of its node.
"""

import os
import signal
import sys
import time
from pathlib import Path

from telegrad import errors, rpc

folder, node = Path(sys.argv[1]), sys.argv[2]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def record(what: str) -> None:
    (folder / f"{what}.part").write_text(str(os.getpid()))
    (folder / f"{what}.part").rename(folder / what)


rpc.init_rpc(f"w{rank}")
if size == 1:
    record("alone")
    signal.pause()  # until the agent restarts it, because another node waits
other = f"w{1 - rank}"
assert rpc.rpc_sync(other, os.getpid, timeout=30) != os.getpid()
if not (folder / "alone").exists():
    record(f"first-{node}")
    if node == "killed":
        signal.pause()
    try:
        rpc.rpc_sync(other, time.sleep, (1000,), timeout=0)
    except errors.WorkerLost:
        record("lost")
    sys.exit(1)  # the agent starts it again
rpc.shutdown(timeout=30)
(folder / f"done{rank}").write_text(f"w{rank} of {size} on {node}")
