"""Serialization: pickling, out-of-band tensors, function names, exceptions."""
