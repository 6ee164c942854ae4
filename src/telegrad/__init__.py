"""Tensor-native RPC for PyTorch: remote calls, remote references and distributed autograd.

Importing this package is cheap and starts nothing; `telegrad.rpc` is the place to begin.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
