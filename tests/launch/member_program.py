"""Program for torchrun: joins, calls all workers, and dies in the first attempts.

Arguments: the folder in which each worker records its result, and the ranks that are killed in consecutive attempts.
"""

import os
import signal
import sys
from pathlib import Path

from telegrad import rpc

folder, victims = Path(sys.argv[1]), [int(rank) for rank in sys.argv[2:]]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

attempts = folder / "attempts"
if rank == 0:  # the agents' own counts of restarts differ
    with attempts.open("a") as f:
        f.write(".")
rpc.init_rpc(f"w{rank}")
assert [rpc.rpc_sync(f"w{other}", os.getpid, timeout=30) for other in range(size)]
attempt = rpc.rpc_sync("w0", os.path.getsize, (str(attempts),), timeout=30) - 1
if attempt < len(victims):
    if rank == victims[attempt]:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # until the agent ends this worker as well
me = rpc.get_worker_info()
rpc.shutdown(timeout=30)
(folder / f"done{rank}").write_text(f"{me.name} {me.id} of {size} in attempt {attempt}")
