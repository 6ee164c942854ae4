"""Member of a group: its calls, handlers, references and threads.

`Worker` (worker.py) composes the parts: `calls` is the caller's side, `serving` the callee's, `refs` the owner's and
the users' side of remote references.
"""

from telegrad.worker.process_hooks import live_workers
from telegrad.worker.scope import Scope, current
from telegrad.worker.worker import Worker

__all__ = ["Scope", "Worker", "current", "live_workers"]
