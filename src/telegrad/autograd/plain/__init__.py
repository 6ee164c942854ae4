"""Backward passes without a context: `loss.backward()` over several workers."""
