"""Profiles of calls: torch's profilers show them and their work on other workers.

Importing `telegrad.rpc` is enough: ``torch.profiler.profile`` and ``torch.autograd.profiler_legacy.profile`` then show
calls, and the operators that they run on other workers, under torch's names. See docs/profiling.md.
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


def remote_calls(profile: object) -> list[RemoteCall]:
    """Return a profiler's calls with reports, in the order of the reports.

    Args:
        profile: a ``torch.profiler.profile`` or a profiler of ``torch.autograd``. Only its last cycle counts.

    Returns:
        Names, times (ns since the epoch, by the clock of this machine) and events.

    Example::

        with torch.profiler.profile() as prof:
            rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
        print([each.key for each in observe.remote_calls(prof)])
    """
    session = session_of(profile)
    return [] if session is None else list(session.calls)


def remote_events(profile: Any) -> list[Any]:
    """Return the events of other workers under a profiler that has ended.

    Args:
        profile: as of `remote_calls`.

    Returns:
        Torch's ``FunctionEvent``, with ``node_id`` the id of the worker.

    Example::

        with torch.profiler.profile() as prof:
            rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
        print({event.name: event.node_id for event in observe.remote_events(prof)})
    """
    events = profile.events() if hasattr(profile, "events") else profile.function_events
    return [event for event in events or () if event.is_remote]
