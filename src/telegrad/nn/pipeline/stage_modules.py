"""Interface of ``nn.Module`` for remote modules that are the stages of a pipeline."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Self

import torch
from torch import nn

from telegrad.nn.no_own_parameters import NoOwnParameters
from telegrad.nn.remote_module import RemoteModule
from telegrad.rref import RRef

__all__ = ["StageModules"]

_REFERENCES = "``parameter_rrefs`` gives references, ``state_dict`` copies."
_PLACES = "The stages are created on their devices: give them as the first argument of ``RemoteModule``."


def _refuse(name: str, why: str) -> NoReturn:
    raise ValueError(f"Method ``{name}`` not supported for Pipeline. {why}")


class StageModules(NoOwnParameters):
    """Remote modules, changed one after the other while no step is running.

    Args:
        stages: the modules.
    """

    def __init__(self, stages: list[RemoteModule]) -> None:
        super().__init__()
        self.stages: nn.ModuleList = nn.ModuleList(stages)
        self._lock = threading.Lock()  # held by a step

    def _modules_of_stages(self) -> Iterator[RemoteModule]:
        for module in self.stages:
            assert isinstance(module, RemoteModule)
            yield module

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keep other threads from running a step.

        Raises:
            RuntimeError: one is running.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "a step of this pipeline is running in another thread: run its steps one after the other, or create"
                " another pipeline of the same remote modules"
            )
        try:
            yield
        finally:
            self._lock.release()

    # ---- parameters

    def parameter_rrefs(self) -> list[RRef[nn.Parameter]]:
        """Return references to the parameters of all stages, for a `DistributedOptimizer`.

        They are in the order of the stages, and of ``parameters()`` within each.

        Raises:
            RuntimeError: a worker is lost.

        Example::

            pipe = Pipeline([("worker1", torch.nn.Linear, (8, 8)), ("worker2", torch.nn.Linear, (8, 3))])
            print([rref.owner_name() for rref in pipe.parameter_rrefs()])  # ['worker1', 'worker1', 'worker2', ...]
        """
        return [rref for module in self._modules_of_stages() for rref in module.remote_parameters()]

    def _refuse_own(self, name: str) -> NoReturn:
        _refuse(name, _REFERENCES)

    # ---- changes of all stages

    def _change(self, method: str, *args: object, **kwargs: object) -> Self:
        with self._exclusive():
            for module in self._modules_of_stages():
                getattr(module, method)(*args, **kwargs)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """``nn.Module.to`` of each stage, for a type.

        Raises:
            ValueError: a device is given.
        """
        if torch._C._nn._parse_to(*args, **kwargs)[0] is not None:
            _refuse("to", _PLACES)
        return self._change("to", *args, **kwargs)


def _add_change(name: str) -> None:
    def method(self: StageModules, *args: object, **kwargs: object) -> StageModules:
        return self._change(name, *args, **kwargs)

    _add(name, method, f"``nn.Module.{name}`` of each stage.")


def _add_refusal(name: str) -> None:
    def method(self: StageModules, *_: object, **__: object) -> NoReturn:
        _refuse(name, _PLACES)

    _add(name, method, "Raise `ValueError`: stages stay on their devices.")


def _add(name: str, method: Any, text: str) -> None:
    method.__name__, method.__qualname__, method.__doc__ = name, f"StageModules.{name}", text
    setattr(StageModules, name, method)


for _name in ("type", "float", "double", "half", "bfloat16", "requires_grad_"):
    _add_change(_name)
for _name in ("to_empty", "cuda", "ipu", "xpu", "mtia", "cpu", "share_memory"):
    _add_refusal(_name)
