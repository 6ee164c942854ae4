"""Base of modules that have parameters and buffers on other workers only."""

from collections.abc import Iterator
from typing import NoReturn

from torch import Tensor, nn

__all__ = ["NoOwnParameters"]


class NoOwnParameters(nn.Module):
    """Module with remote parameters and buffers only."""

    def _refuse_own(self, name: str) -> NoReturn:
        """Raise the `ValueError` of a method that has nothing to return."""
        raise NotImplementedError

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Raise `ValueError`: the parameters are on another worker.

        With ``recurse=False`` there are none, so that a containing module can collect its own.
        """
        if recurse:
            self._refuse_own("parameters")
        return iter(())

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Raise `ValueError` as `parameters` does."""
        if recurse:
            self._refuse_own("named_parameters")
        return iter(())

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Raise `ValueError` as `parameters` does."""
        if recurse:
            self._refuse_own("buffers")
        return iter(())

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Raise `ValueError` as `parameters` does."""
        if recurse:
            self._refuse_own("named_buffers")
        return iter(())
