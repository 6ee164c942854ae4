"""The faulty agent of torch's own tests: real messages are lost or late, by torch's names for them.

Importing this registers the backend ``FAULTY_TENSORPIPE``, as importing torch's does.
"""

from collections.abc import Mapping, Sequence

from telegrad.compat.rpc._testing.faults import Faults
from telegrad.rpc import constants
from telegrad.rpc.agent import Agent
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


from telegrad.compat.rpc._testing import faulty_agent_backend_registry  # noqa: E402, F401  # it needs these classes
