"""Shared parts of the examples: starting processes, showing progress, the digits."""
