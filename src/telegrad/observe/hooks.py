"""Hooks of torch's profilers: their start, their end, and their events.

Torch has no registration for this, so methods of its two profiler classes are wrapped. Each wrapper calls the original.
A profiler without calls shows the same as without the wrappers.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

from telegrad.observe import recording, torch_profiler, trace
from telegrad.observe.profiler import profiler
from telegrad.observe.recording import Option
from telegrad.observe.sessions import Session

__all__ = ["install", "session_of"]

_SESSION = "_telegrad_session"


def session_of(profile: object) -> Session | None:
    """Return the session of one of torch's profilers.

    None if it has not been started since Telegrad was imported.
    """
    session: Session | None = getattr(getattr(profile, "profiler", None) or profile, _SESSION, None)
    return session


def _wrap(owner: type, name: str, wrapper: Callable[..., object]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: object, *args: object, **kwargs: object) -> object:
        return wrapper(self, functools.partial(original, self, *args, **kwargs), *args, **kwargs)

    setattr(owner, name, wrapped)


def _start(self: object, start: Callable[[], object], *_: object, **__: object) -> object:
    recording.pause()
    before = time.time_ns()
    try:
        result = start()
    except BaseException:
        recording.resume()
        raise
    session = Session(Option.of(self), not isinstance(self, torch_profiler.Kineto), before)
    profiler.open(session)
    setattr(self, _SESSION, session)
    return result


def _end(self: Any, end: Callable[[], object], *_: object, **__: object) -> object:
    session = session_of(self) if self.enabled else None
    if session is None or session.closed:
        return end()
    profiler.close(session)
    try:
        return end()
    finally:
        recording.resume()


def _end_legacy(self: Any, end: Callable[[], object], *_: object, **__: object) -> object:
    result = _end(self, end)
    session = session_of(self) if self.enabled else None
    if session is not None:
        self.function_events = session.completed(self.function_events)
    return result


def _parse(self: object, parse: Callable[[], Any], result: Any, *_: object, **__: object) -> object:
    session = session_of(self)
    events = parse()
    return events if session is None else session.extended(events, result.trace_start_ns())


def _export(self: object, export: Callable[[], object], path: str, *_: object, **__: object) -> object:
    result = export()
    session = session_of(self)
    if session is not None and (session.calls or session.more):
        trace.add(path, session)
    return result


def install() -> None:
    """Wrap the methods of torch's profilers."""
    _wrap(torch_profiler.Kineto, "_start_trace", _start)
    _wrap(torch_profiler.Kineto, "__exit__", _end)
    _wrap(torch_profiler.Kineto, "_parse_kineto_results", _parse)
    _wrap(torch_profiler.Kineto, "export_chrome_trace", _export)
    if torch_profiler.legacy is not None:
        _wrap(torch_profiler.Legacy, "_start_trace", _start)
        _wrap(torch_profiler.Legacy, "__exit__", _end_legacy)
