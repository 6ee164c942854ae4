"""Non-public names of torch's profilers that this package needs."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler, profiler_util

__all__ = [
    "EventList",
    "FunctionEvent",
    "Kineto",
    "Legacy",
    "ProfilerConfig",
    "ProfilerState",
    "disable_legacy",
    "enable_legacy",
    "legacy",
    "profiler_enabled",
    "record_function",
]

FunctionEvent: Callable[..., Any] = profiler_util.FunctionEvent
EventList: Callable[..., Any] = profiler_util.EventList
record_function: Any = profiler.record_function
Kineto: type[profiler.profile] = profiler.profile
ProfilerConfig: Callable[..., object] = torch._C._profiler.ProfilerConfig
ProfilerState: type[torch._C._profiler.ProfilerState] = torch._C._profiler.ProfilerState

_native: Any = torch._C._autograd
profiler_enabled: Callable[[], bool] = _native._profiler_enabled  # of either kind, in the calling thread

legacy: Any  # the module; None where torch has removed it, as it has announced
try:
    from torch.autograd import profiler_legacy as legacy
except ImportError:  # then profiles show calls but no operators of their callees
    legacy = None
Legacy: Any = getattr(legacy, "profile", None)
enable_legacy: Any = getattr(_native, "_enable_profiler_legacy", None)
disable_legacy: Any = getattr(_native, "_disable_profiler_legacy", None)
