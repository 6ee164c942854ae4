"""Torch's module of the profiler of all threads that run requests, which Telegrad does not have yet."""

from telegrad.compat.unbuilt import unbuilt

__getattr__ = unbuilt(__name__, "RPC profiler")
