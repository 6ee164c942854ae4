"""Chrome traces: adds the called processes to those that Kineto writes.

Each called worker becomes a process of the trace. An arrow leads from each call to the work of its callee.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from telegrad.observe.events import REMOTE_OP
from telegrad.observe.sessions import RemoteCall, Session

__all__ = ["add"]

_HEAD = 1 << 20  # bytes from the start of a file in which its event list must begin
_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d+)')


def add(path: str | Path, session: Session) -> None:
    """Add other workers' events to a trace that Kineto has written.

    Another kind of file stays unchanged.
    """
    head = _head_of(path)
    begin = _LIST.search(head)
    if begin is None:
        return
    base = _BASE.search(head)
    events = list(_events(session, int(base.group(1)) if base else 0))
    added = ",\n".join(json.dumps(event) for event in events).encode()
    partial = f"{path}.part"
    with open(path, "rb") as old, open(partial, "wb") as new:
        new.write(old.read(begin.end()))
        new.write(b"\n" + added)
        rest = old.read(_HEAD)
        if not rest.lstrip().startswith(b"]"):
            new.write(b",\n")
        new.write(rest)
        shutil.copyfileobj(old, new)
    os.replace(partial, path)


def _head_of(path: str | Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(_HEAD)


def _events(session: Session, base: int) -> Iterator[dict[str, object]]:
    """Yield the events in Chrome's form, with times in us since `base` ns."""

    def us(ns: int) -> float:
        return (ns - base) / 1000

    for node, name in sorted(session.names.items()):
        if node == session.node and not any(call.node == node for call in session.calls):
            continue  # Kineto has named this process
        about = {"ph": "M", "name": "process_name", "pid": _process(node), "tid": 0, "ts": 0}
        yield about | {"args": {"name": f"worker {name}"}}
    for number, call in enumerate(session.calls):
        thread = _thread(call)
        yield {
            "ph": "X", "cat": "rpc", "name": call.key, "pid": _process(call.node), "tid": thread,
            "ts": us(call.received), "dur": us(call.replied) - us(call.received), "args": {},
        }  # fmt: skip
        flow = {"cat": "rpc", "name": "rpc", "id": number}
        yield {**flow, "ph": "s", "pid": session.process, "tid": call.thread, "ts": us(call.sent)}
        yield {**flow, "ph": "f", "bp": "e", "pid": _process(call.node), "tid": thread, "ts": us(call.received)}

    for event in session.others():
        call_name, remote, name = event.name.rpartition(REMOTE_OP)
        yield {
            "ph": "X", "cat": "cpu_op", "name": name, "pid": _process(event.node) if remote else session.process,
            "tid": event.thread, "ts": us(event.start), "dur": us(event.end) - us(event.start),
            "args": {"Call": call_name, "Input Dims": event.shapes},
        }  # fmt: skip


def _process(node: int) -> str:
    return f"rpc worker {node}"


def _thread(call: RemoteCall) -> int:
    """Return the callee's thread that ran the function.

    Calls without torch operators have a separate line, 0.
    """
    return next((event.thread for event in call.events if event.node == call.node and not event.is_async), 0)
