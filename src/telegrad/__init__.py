"""Tensor-native RPC for PyTorch: calls, references and distributed autograd.

``import telegrad`` starts no threads and does not import torch. The modules in ``__all__`` are imported when first
used::

    import telegrad

    telegrad.rpc.init_rpc("worker0", rank=0, world_size=2)

`telegrad.rpc` has the main API.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # at run time `__getattr__` below imports them
    from telegrad import autograd, compat, errors, nn, observe, optim, options, rpc, testing, types

__all__ = [
    "__version__",
    "autograd",
    "compat",
    "errors",
    "nn",
    "observe",
    "optim",
    "options",
    "rpc",
    "testing",
    "types",
]

__version__ = "0.1.0"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # a type checker would accept every name as an attribute of this module

    def __getattr__(name: str) -> object:
        if name in __all__:
            return importlib.import_module(f"{__name__}.{name}")  # the import also sets the attribute
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
