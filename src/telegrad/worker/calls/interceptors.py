"""Interceptors: what looks at every call of this process.

The native client asks once per call whether `active` is empty. If it is not, `Calls.encode_slow` encodes the call and
`Calls.send` sends it; they hand it to the profiler, the pickler and the fault injector there.
"""

from typing import Any

__all__ = ["PICKLER", "PROFILER", "active", "switch"]

active: dict[Any, Any] = {}  # always the same object: the core looks there
PROFILER = "profiler"  # a telegrad.worker.calls.tracing.Observer
PICKLER = "pickler"  # of the program's own, and the type that it pickles (rpc.api._use_rpc_pickler)


def switch(key: Any, interceptor: Any) -> None:
    """Set an interceptor, or with None remove it."""
    if interceptor is None:
        active.pop(key, None)
    else:
        active[key] = interceptor
