"""Torch's module of RRef proxies.

The proxies are Telegrad's own. The functions are kept for programs that call them.
"""

from collections.abc import Callable, Mapping, Sequence

from telegrad.rpc import functions, rpc_async  # noqa: F401  # as in torch's module
from telegrad.rpc.constants import UNSET_RPC_TIMEOUT  # noqa: F401  # as in torch's module
from telegrad.rref import RRef, RRefProxy

__all__ = ["RRefProxy"]


def _local_invoke(rref: RRef[object], func_name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    return getattr(rref.local_value(), func_name)(*args, **kwargs)


@functions.async_execution
def _local_invoke_async_execution(
    rref: RRef[object], func_name: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    return getattr(rref.local_value(), func_name)(*args, **kwargs)


def _invoke_rpc(
    rref: RRef[object], rpc_api: Callable[..., object], func_name: str, timeout: float, *args: object, **kwargs: object
) -> object:
    return getattr(RRefProxy(rref, rpc_api, timeout), func_name)(*args, **kwargs)
