"""Program for torchrun: the worker of the first attempt is unknown to the agent.

So it outlives its attempt. Arguments: a folder, and the rank that is killed in the first attempt. The worker of the
other rank continues until the test has opened the folder's pipe, and leaves its group only then.
"""

import os
import signal
import sys
from pathlib import Path

from telegrad import rpc

folder, victim = Path(sys.argv[1]), int(sys.argv[2])
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

if attempt == 0 and os.fork():
    if rank == victim:
        os.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
if attempt == 0:
    os.setsid()

rpc.init_rpc(f"w{rank}")
other = rpc.rpc_sync(f"w{1 - rank}", os.getpid, timeout=30)
if attempt == 0:
    if rank == victim:
        signal.pause()
    os.kill(other, signal.SIGKILL)
    (folder / "pipe").read_bytes()
rpc.shutdown(timeout=30)
(folder / f"{'survived' if attempt == 0 else 'done'}{rank}").write_text(f"attempt {attempt}")
