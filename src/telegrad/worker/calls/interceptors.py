"""Interceptors that see every call of this process.

The native client checks once per call whether `active` is empty. If it is not, `Calls.encode_slow` encodes the call and
`Calls.send` sends it, with the profiler, the pickler and the fault injector.
"""

from typing import Any

__all__ = ["PICKLER", "PROFILER", "active", "switch"]

active: dict[object, Any] = {}  # never replaced: the core holds this object
PROFILER = "profiler"  # a telegrad.worker.calls.tracing.Observer
PICKLER = "pickler"  # the program's pickler, and the type that it pickles (rpc.api._use_rpc_pickler)


def switch(key: object, interceptor: object) -> None:
    """Set an interceptor, or remove it with None."""
    if interceptor is None:
        active.pop(key, None)
    else:
        active[key] = interceptor
