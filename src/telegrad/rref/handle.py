"""Interface of `RRef` objects for the other modules of this folder."""

from typing import Any, Protocol, Self, TypeAlias, TypeVar

from telegrad.errors import TelegradError
from telegrad.protocols.rref import RRefId
from telegrad.rref.creation import PendingCreation
from telegrad.worker import Worker
from telegrad.worker.calls.future import CallFuture

__all__ = ["AnyHandle", "Handle"]

T_co = TypeVar("T_co", covariant=True)


class Handle(Protocol[T_co]):
    """A handle of a value; see `telegrad.rref.rref.RRef`."""

    id: RRefId
    owner_id: int
    _creation: PendingCreation | None
    _fork: int | None
    _forked_by: int
    _is_created: bool
    _type_future: CallFuture[Any] | None

    @classmethod
    def of(cls, worker: Worker, rref: RRefId, owner: int, fork: tuple[int, int] | None = None) -> Self:
        """Create a handle of a reference that the protocol knows."""

    @property
    def worker(self) -> Worker:
        """The worker that holds this reference."""

    def is_owner(self) -> bool:
        """Return whether this worker has the value."""

    def is_unknown(self) -> bool:
        """Return whether requests must introduce this reference to its owner."""

    def local_value(self) -> T_co:
        """Return the value on its owner."""

    def _usable_worker(self) -> Worker:
        """Return the worker for calls about this reference, or raise an error."""

    def _check(self) -> None:
        """Raise an error if the reference cannot be used."""

    def _start(self, function: object, timeout: float) -> CallFuture[Any]:
        """Start a call about the value on its owner."""

    def _create(self, name: str, args: tuple[object, ...], kwargs: dict[str, object], timeout: int) -> "AnyHandle":
        """Create a reference to the result of a method."""

    def _on_error(self, error: TelegradError) -> TelegradError:
        """Return an error of a use of the value, as the program gets it."""


AnyHandle: TypeAlias = Handle[Any]
"""A handle of a value of unknown type."""
