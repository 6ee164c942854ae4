"""The glue: native events to protocols to native sends. `Worker` (worker.py) is the place to begin."""

from telegrad.worker.lifetimes import live_workers
from telegrad.worker.scope import Scope, current
from telegrad.worker.worker import Worker

__all__ = ["Scope", "Worker", "current", "live_workers"]
