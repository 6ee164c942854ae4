"""Torch's module of RRef proxies.

The proxies are Telegrad's own. The functions are kept for programs that call them.
"""

from collections.abc import Callable
from typing import Any

from telegrad.rpc import functions, rpc_async  # noqa: F401  # as in torch's module
from telegrad.rpc.constants import UNSET_RPC_TIMEOUT  # noqa: F401  # as in torch's module
from telegrad.rref import RRef, RRefProxy

__all__ = ["RRefProxy"]


def _local_invoke(rref: RRef[Any], func_name: str, args: Any, kwargs: Any) -> Any:
    return getattr(rref.local_value(), func_name)(*args, **kwargs)


@functions.async_execution
def _local_invoke_async_execution(rref: RRef[Any], func_name: str, args: Any, kwargs: Any) -> Any:
    return getattr(rref.local_value(), func_name)(*args, **kwargs)


def _invoke_rpc(
    rref: RRef[Any], rpc_api: Callable[..., Any], func_name: str, timeout: float, *args: Any, **kwargs: Any
) -> Any:
    return getattr(RRefProxy(rref, rpc_api, timeout), func_name)(*args, **kwargs)
