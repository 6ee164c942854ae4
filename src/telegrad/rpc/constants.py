"""Defaults, under the names that they have in ``torch.distributed.rpc.constants``."""

from datetime import timedelta

from telegrad.options import DEFAULT_INIT_METHOD, DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC

__all__ = [
    "DEFAULT_INIT_METHOD",
    "DEFAULT_NUM_WORKER_THREADS",
    "DEFAULT_PROCESS_GROUP_TIMEOUT",
    "DEFAULT_RPC_TIMEOUT_SEC",
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "UNSET_RPC_TIMEOUT",
]

DEFAULT_SHUTDOWN_TIMEOUT: float = 0
"""Seconds that a graceful shutdown waits for the others; 0 is no limit."""

DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)
"""Timeout of the process group of torch's backend. Kept for programs that read it: Telegrad creates none."""

UNSET_RPC_TIMEOUT: float = -1.0
"""Timeout of a call that stands for the worker's default."""

# Torch's private names for the same values.
_DEFAULT_INIT_METHOD = DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = DEFAULT_NUM_WORKER_THREADS
_DEFAULT_RPC_TIMEOUT_SEC = DEFAULT_RPC_TIMEOUT_SEC
_UNSET_RPC_TIMEOUT = UNSET_RPC_TIMEOUT
