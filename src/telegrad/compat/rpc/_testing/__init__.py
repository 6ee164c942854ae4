"""Faulty agent of torch's tests: loses and delays messages.

The messages have torch's names. Importing this module registers the backend ``FAULTY_TENSORPIPE``, as in torch.
"""

from collections.abc import Mapping, Sequence

from telegrad.compat.rpc._testing.faults import Faults
from telegrad.rpc import constants
from telegrad.rpc.agent import Agent
from telegrad.rpc.options import TensorPipeRpcBackendOptions

__all__ = ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions", "is_available"]


def is_available() -> bool:
    """Return whether a faulty agent is available."""
    return True


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Options of the faulty agent.

    Args:
        num_worker_threads: number of requests that run at once.
        rpc_timeout: default timeout of calls in seconds.
        init_method: address of the rendezvous.
        messages_to_fail: torch's names of the messages to lose.
        messages_to_delay: torch's names of the messages to delay, with the delay of each in seconds.
        num_fail_sends: number of times that a message which is sent again gets lost.

    Raises:
        ValueError: a name is not one of torch's messages.
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
        self.faults()  # checks the names

    def faults(self) -> Faults:
        """Return the interceptor that causes the faults."""
        return Faults(self.messages_to_fail, self.messages_to_delay, self.num_fail_sends)


class FaultyTensorPipeAgent(Agent):
    """Worker of the backend ``FAULTY_TENSORPIPE``; only its class is different."""


from telegrad.compat.rpc._testing import faulty_agent_backend_registry  # noqa: E402, F401  # it needs these classes
