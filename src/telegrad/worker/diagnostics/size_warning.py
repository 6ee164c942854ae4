"""Warning about references or contexts that nothing releases."""

import logging

__all__ = ["SizeWarning"]

logger: logging.Logger = logging.getLogger("telegrad")


class SizeWarning:
    """Warning that is logged when a table passes a size, once.

    Args:
        worker: Name of the worker.
        what: What the table contains, for example ``"remote references"``.
        option: Name of the option with the size.
        size: The size; 0 for no warning.
    """

    def __init__(self, worker: str, what: str, option: str, size: int) -> None:
        self._worker = worker
        self._what = what
        self._option = option
        self._above: float = size or float("inf")

    def check(self, size: int) -> None:
        """Log the warning if the table is that large. Holds no lock meanwhile.

        Args:
            size: The size of the table.
        """
        if size <= self._above:
            return
        self._above = float("inf")
        logger.warning(
            "worker %s has %d %s, more than the option %s. Does the program release them? See rpc.debug_info().",
            self._worker,
            size,
            self._what,
            self._option,
        )
