"""The glue: native events to protocols to native sends. `Worker` (worker.py) is the place to begin."""

from telegrad.worker.scope import Scope, current
from telegrad.worker.worker import Worker, live_workers

__all__ = ["Scope", "Worker", "current", "live_workers"]
