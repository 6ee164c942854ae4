"""Loading of pickles: the only module that does it.

A pickle names functions, and loading it calls them. Each worker has a gate through which it loads the pickles in its
messages. The gate of a worker with the option ``allow_pickle=False`` is closed: nothing that arrives is unpickled, and
what would have to be pickled is not sent. A static test checks that no other module loads pickles.
"""

import pickle
from collections.abc import Iterable
from typing import IO, Any

from telegrad.errors import PickleRefused

__all__ = ["OPEN", "PickleGate", "Unpickler"]


class PickleGate:
    """Permission of a worker to load pickles.

    Args:
        is_open: Whether it may.
    """

    def __init__(self, is_open: bool) -> None:
        self.is_open: bool = is_open

    def require_open(self, what: str) -> None:
        """Check that pickles may be loaded.

        Args:
            what: The pickle, for the error.

        Raises:
            PickleRefused: The gate is closed.
        """
        if not self.is_open:
            raise PickleRefused(
                f"{what} came as a pickle, and this worker loads none (option allow_pickle=False). Send plain data and"
                " tensors, or set the option on the sender as well, which then names the value."
            )

    def loads(self, data: bytes | memoryview, what: str) -> Any:
        """Load a pickle.

        Raises:
            PickleRefused: The gate is closed.
            Exception: Whatever the pickle raises.
        """
        self.require_open(what)
        return pickle.loads(data)


class Unpickler(pickle.Unpickler):
    """Unpickler behind a gate.

    Raises:
        PickleRefused: The gate is closed.
    """

    def __init__(
        self, file: IO[bytes], *, gate: PickleGate, what: str = "a message", buffers: Iterable[Any] | None = None
    ) -> None:
        gate.require_open(what)
        super().__init__(file, buffers=buffers)


OPEN = PickleGate(True)
"""Gate of code that no message of another process reaches."""
