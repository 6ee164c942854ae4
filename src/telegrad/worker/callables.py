"""What is called, by its looks: its name for errors, and whether torch has it."""

from typing import Any

import torch

__all__ = ["find_builtin", "is_scripted", "name_of"]


def name_of(function: Any) -> str:
    """What errors call it."""
    return getattr(function, "__qualname__", None) or repr(function)


def is_scripted(function: Any) -> bool:
    """Is it a torch operator or a scripted function? (torch's own RPC has other message types for these.)"""
    if isinstance(function, torch.jit.ScriptFunction):
        return True
    return find_builtin(function) is not None


def find_builtin(function: Any) -> str | None:
    """The name of a torch operator in torch's registry, such as ``aten::add``; None for everything else."""
    name: str | None = torch.jit._builtins._find_builtin(function)  # type: ignore[no-untyped-call]
    return name
