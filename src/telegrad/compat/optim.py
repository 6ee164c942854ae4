"""Replacement of ``torch.distributed.optim.optimizer`` in a drop-in."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.local import LocalOptimizer
from telegrad.rpc.api import _worker, logger  # noqa: F401  # torch's module has a logger too
from telegrad.rref import RRef

__all__ = ["DistributedOptimizer"]


def __getattr__(name: str) -> Any:
    if name == "functional_optim_map":  # torch's own, which is slow to import
        from torch.distributed.optim.utils import functional_optim_map

        return functional_optim_map
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _LocalOptimizer(LocalOptimizer):
    """An owner's part of a distributed optimizer, constructed as torch's is."""

    def __init__(
        self, optim_cls: Callable[..., Any], local_params_rref: Iterable[RRef[Any]], *args: Any, **kwargs: Any
    ) -> None:
        self._local_params = [rref.local_value() for rref in local_params_rref]
        super().__init__(_worker(), optim_cls, [({}, self._local_params, None)], False, args, kwargs)


_ScriptLocalOptimizer = _LocalOptimizer  # one for all classes: none is compiled by TorchScript


def _new_local_optimizer(
    optim_cls: Callable[..., object], local_params_rref: Iterable[RRef[object]], *args: object, **kwargs: object
) -> RRef[_LocalOptimizer]:
    return RRef(_LocalOptimizer(optim_cls, local_params_rref, *args, **kwargs))


def _local_optimizer_step(local_optim_rref: RRef[LocalOptimizer], autograd_ctx_id: int) -> None:
    local_optim_rref.local_value().step(autograd_ctx_id)


_new_script_local_optimizer = _new_local_optimizer
_script_local_optimizer_step = _local_optimizer_step


def _wait_for_all(rpc_futs: Sequence[Any]) -> list[Any]:
    """Wait for all futures, then raise the last error if there was one."""
    results: list[Any] = []
    error = None
    for future in rpc_futs:
        try:
            results.append(future.wait())
        except Exception as e:
            results.append(e)
            error = e
    if error is not None:
        raise error
    return results
