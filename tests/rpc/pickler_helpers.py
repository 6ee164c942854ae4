"""Pickler of a program that tests use."""

import pickle
from typing import Any

import torch


class Plain:
    """Pickles all of a value, with its tensors."""

    def serialize(self, value: Any) -> tuple[bytes, list[torch.Tensor]]:
        return pickle.dumps(value), []

    def deserialize(self, data: bytes, tensors: list[torch.Tensor]) -> Any:
        return pickle.loads(data)
