"""Backward passes: one task per pass of a worker, and messages between workers."""
