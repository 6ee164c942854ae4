"""Completion of the call that creates a value, at the worker that made the call."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from telegrad.errors import RpcTimeout, WorkerLost
from telegrad.protocols.rref import RRefId
from telegrad.serialize.tracebacks import is_interrupt
from telegrad.wire.ints import FLAG_FAILED, FLAG_METADATA, STATUS_REPLIED, TAG_CREATED
from telegrad.worker import Worker
from telegrad.worker.calls.callables import is_scripted
from telegrad.worker.calls.client import Completion
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.losses import LossReason
from telegrad.worker.unread_failures import Failure

if TYPE_CHECKING:
    from telegrad.worker.calls.client import Calls

__all__ = ["CreationFuture", "PendingCreation"]

_SLOW_FLAGS = FLAG_FAILED | FLAG_METADATA
_UNREAD = "use its reference"


class PendingCreation:
    """Completion target of the call that creates a value.

    A pool thread, or a thread that makes a call, calls it with the completion. Most creations have no future; one is
    created on demand. The call may end before its reference is registered; then its result is kept until then.

    Args:
        worker: The creator.
        request: (owner, function or its name, timeout in ns), for errors.
    """

    __slots__ = (
        "_call", "_calls", "_future", "_incomplete_future", "_is_used", "_request", "_worker",
        "early_result", "ended", "failure", "has_handle", "is_intercepted", "rref",
    )  # fmt: skip

    def __init__(self, worker: Worker, request: tuple[int, Callable[..., object] | str, int]) -> None:
        self._worker = worker
        self._request: tuple[int, Callable[..., object] | str, int] = request
        self.rref: RRefId | None = None  # set by the registration
        self.early_result: tuple[BaseException | None, bool] | None = None  # arguments of an early `finish`
        self._calls: Calls = worker.calls
        self._call = 0
        self.ended: bool = False
        self.has_handle: bool = False  # its end is counted
        self._is_used = False
        self.failure: Failure | None = None
        self._future: CreationFuture | None = None
        self._incomplete_future: CreationFuture | None = None  # until it is completed
        self.is_intercepted: bool = False

    def __call__(self, completion: Completion) -> None:
        """Process the completion of the call; the pool completes the future."""
        self.on_completion(completion)
        if self._incomplete_future is not None:
            self._worker.pool.submit(self.complete)

    def on_completion(self, completion: Completion) -> None:
        """Process the completion of the call, without completing the future.

        A signal handler may raise at any moment. Then a thread of the pool, in which none raises, processes it again.
        """
        try:
            self._process(completion)
        except BaseException:
            if not self.ended and self.early_result is None:
                self._worker.pool.submit(self._process, completion)
            raise

    def _process(self, completion: Completion) -> None:
        status, tag, flags, *_ = completion
        if status == STATUS_REPLIED and tag == TAG_CREATED and not flags & _SLOW_FLAGS:
            if not self._worker.references.finish_creation(self, True):
                self.finish(None)
            return
        try:
            self._worker.calls.read(completion, self._request)
        except BaseException as e:
            self.finish(e.with_traceback(None))
            if is_interrupt(e):  # the creation had to end first
                raise
        else:
            self.finish(None, bool(flags & FLAG_FAILED))

    def finish(self, error: BaseException | None, owner_has_error: bool = False) -> None:
        """Record the result of the call; a future that is created later ends with it.

        Args:
            error: The error, if the owner did not reply.
            owner_has_error: The owner keeps an exception instead of a value.
        """
        references = self._worker.references
        with references.lock:
            rref = self.rref
            if rref is None:
                self.early_result = error, owner_has_error
                return
        if error is not None or owner_has_error:
            self.failure = Failure(error, False, self._request, _UNREAD, self._worker.calls)
            if self._is_used:  # checked last: a use at the same time finds the failure, or has set this before
                self.failure.read = True
        if isinstance(error, RpcTimeout):
            references.create_failed(rref, error, may_exist=True)  # the request is sent in any case
        elif isinstance(error, WorkerLost):
            references.create_lost(rref, LossReason(error.why, error.incarnation))
        elif error is not None:
            references.create_failed(rref, error, may_exist=False)
        references.finish_creation(self, error is None)

    # ---- interceptors

    def intercepted(self) -> CallFuture[None]:
        """Return a future of the call, which interceptors complete."""
        self.is_intercepted = True
        # The creation logs a failure that is not read.
        future: CallFuture[None] = CallFuture._of(self._calls, self._request, is_read=True)
        future._on_late_reply = self._on_late_reply

        def finish(_: object) -> None:
            self.finish(future.failure())
            self.complete()

        torch.futures.Future.add_done_callback(future, finish)
        return future

    def _on_late_reply(self) -> None:
        """Record that the owner has made the value of a creation that has timed out."""
        if self.rref is not None and self._request[0] != self._worker.info.id:
            self._worker.references.created(self.rref)

    @property
    def is_scripted(self) -> bool:
        """Whether the value is the result of a torch operator or a scripted function."""
        return is_scripted(self._request[1])

    @property
    def value_class(self) -> type | None:
        """Class that is called to create the value; None if the function is no class."""
        function = self._request[1]
        return function if isinstance(function, type) else None

    def done(self) -> bool:
        """Return whether the call has ended."""
        return self.ended

    def mark_used(self) -> None:
        """Record a use of the reference: its user gets the failure, so it is not logged."""
        self._is_used = True
        if self.failure is not None:
            self.failure.read = True

    def future(self) -> "CreationFuture":
        """Return the future of the call; always the same. Its value is None."""
        with self._worker.references.lock:
            if self._future is not None:
                return self._future
            future = CreationFuture._of(self._calls, self._request)
            self._future = self._incomplete_future = future
            future.creation = self
            future._set_sent(self._call)
            done = self.ended
        if done:
            self.complete()
        return future

    def complete(self) -> None:
        """Complete the future of a call that has ended, if there is a future."""
        with self._worker.references.lock:
            future, self._incomplete_future = self._incomplete_future, None
        if future is None:
            return
        error = None if self.failure is None else self.failure.error
        if error is None:
            future._succeed(None)
        else:
            future._fail(error)


class CreationFuture(CallFuture[None]):
    """Future of a creation. Reading it counts as a use of the reference."""

    __slots__ = ("creation",)
    creation: PendingCreation

    def wait(self) -> None:
        self.creation.mark_used()
        return super().wait()

    def value(self) -> None:
        self.creation.mark_used()
        return super().value()

    def _failed(self, error: BaseException) -> Failure:
        failure = self.creation.failure
        return super()._failed(error) if failure is None else failure

    def __call__(self, completion: Completion) -> None:
        """Process the completion, in the thread that waits for it."""
        self.creation.on_completion(completion)
        self.creation.complete()
