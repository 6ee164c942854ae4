"""Seeing into calls: what torch's profilers show of them, and of what they do on other workers.

Importing `telegrad.rpc` is enough: ``torch.profiler.profile`` and ``torch.autograd.profiler_legacy.profile`` then show
calls, and the operators that they run elsewhere, under torch's own names. See docs/profiling.md.
"""

from collections.abc import Callable
from typing import Any

from telegrad.observe.hooks import install, session_of
from telegrad.observe.profiler import profiler
from telegrad.observe.server import ServerProfile
from telegrad.observe.sessions import RemoteCall
from telegrad.observe.spans import call_key

__all__ = ["RemoteCall", "ServerProfile", "call_key", "name_next_call", "remote_calls", "remote_events"]

install()

name_next_call: Callable[[str], None] = profiler.name_next_call


def remote_calls(profile: Any) -> list[RemoteCall]:
    """The calls under a profiler whose callees have reported what they did, in the order in which they did so.

    Args:
        profile: a ``torch.profiler.profile`` or one of the profilers of ``torch.autograd``; of several cycles the last.

    Returns:
        Names, times (ns since the epoch, by this machine's clock) and events.
    """
    session = session_of(profile)
    return [] if session is None else list(session.calls)


def remote_events(profile: Any) -> list[Any]:
    """What other workers did under a profiler that has ended: those of its events that are remote.

    Args:
        profile: as of `remote_calls`.

    Returns:
        Torch's ``FunctionEvent``, with ``node_id`` the id of the worker.
    """
    events = profile.events() if hasattr(profile, "events") else profile.function_events
    return [event for event in events or () if event.is_remote]
