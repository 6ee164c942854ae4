"""Backward passes: one task for each pass of a worker, and the messages between workers."""
