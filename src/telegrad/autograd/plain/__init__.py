"""Backward passes without a context: `loss.backward()` continues on the other workers."""
