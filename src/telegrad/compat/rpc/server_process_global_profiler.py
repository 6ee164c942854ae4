"""Torch's module of the profiler of all request threads."""

from telegrad.observe import ServerProfile as _server_process_global_profile

__all__ = ["_server_process_global_profile"]
