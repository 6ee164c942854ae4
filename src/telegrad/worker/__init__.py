"""One member of a group: calls, the serving of requests, references, and what they share.

`Worker` (worker.py) composes the rooms: `calls` is the caller's side, `serving` the callee's, `refs` the owner's and
the users' side of remote references.
"""

from telegrad.worker.process_hooks import live_workers
from telegrad.worker.scope import Scope, current
from telegrad.worker.worker import Worker

__all__ = ["Scope", "Worker", "current", "live_workers"]
