"""The faulty agent of torch's own tests: real messages are lost or late, by torch's names for them.

Importing this registers the backend ``FAULTY_TENSORPIPE``, as importing torch's does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from telegrad.compat.rpc._testing.faults import Faults
from telegrad.rpc import api, constants
from telegrad.rpc.agent import Agent
from telegrad.rpc.backend_registry import backend_registered, register_backend
from telegrad.rpc.options import TensorPipeRpcBackendOptions

__all__ = ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions", "is_available"]


def is_available() -> bool:
    """Whether there is a faulty agent."""
    return True


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Options of the faulty agent.

    Args:
        num_worker_threads: how many requests run at once.
        rpc_timeout: seconds that a call may take where none are given with it.
        init_method: where the workers meet.
        messages_to_fail: torch's names of the messages that are lost.
        messages_to_delay: torch's names of messages, and by how many seconds each is late.
        num_fail_sends: how often a message that is sent again when it was lost is lost.

    Raises:
        ValueError: a name that torch does not have.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(num_worker_threads=num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method)
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends
        self.faults()  # are the names known?

    def faults(self) -> Faults:
        """What does it."""
        return Faults(self.messages_to_fail, self.messages_to_delay, self.num_fail_sends)


class FaultyTensorPipeAgent(Agent):
    """Torch's name for the agent; only its class differs from any other."""


def _construct_options(rpc_timeout: float, init_method: str, **others: Any) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **others)


def _init_agent(store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any) -> Any:
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. {rpc_backend_options}")
    agent = api._start_agent(store, name, rank, world_size, rpc_backend_options)
    agent.worker.calls.send_filter = rpc_backend_options.faults()
    return agent


if not backend_registered("FAULTY_TENSORPIPE"):
    register_backend("FAULTY_TENSORPIPE", _construct_options, _init_agent)
