"""What becomes of the call that makes a value elsewhere, at the worker that made the call."""

from typing import Any

import torch

from telegrad.errors import RpcTimeout, WorkerLost
from telegrad.protocols.rref import RRefId
from telegrad.serialize.tracebacks import is_interrupt
from telegrad.wire import Flag, Status, Tag
from telegrad.worker import Worker
from telegrad.worker.calls.client import complete
from telegrad.worker.calls.future import NO_DEVICES, CallFuture
from telegrad.worker.calls.tracing import Span
from telegrad.worker.unread_failures import Failure

__all__ = ["CreationFuture", "PendingCreation"]

_REPLIED, _CREATED = int(Status.REPLIED), int(Tag.CREATED)
_FAILED, _UNUSUAL = int(Flag.FAILED), int(Flag.FAILED | Flag.METADATA)
_UNREAD = "use its reference"


class PendingCreation:
    """Goes with the call as its cookie: a thread of the pool, or one that makes a call, calls it with the outcome. Most
    of them end so, unseen; a future is made for whoever asks for one.

    The call may end before this worker has got round to keeping count of its reference: what became of it waits then.

    Args:
        worker: the creator.
        request: (owner, what is called or its name, time-out in ns), for errors.
    """

    __slots__ = (
        "_call", "_calls", "_delayed", "_future", "_read", "_request", "_scripted", "_span", "_uncompleted", "_worker",
        "early", "ended", "failure", "rref",
    )  # fmt: skip

    def __init__(self, worker: Worker, request: tuple[int, Any, int]) -> None:
        self._worker = worker
        self._request: Any = request
        self.rref: RRefId | None = None  # what is created
        self.early: tuple[BaseException | None, bool] | None = None  # for `over`, from before that was known
        self._calls: Any = worker.calls
        self._call = 0
        self.ended: bool = False  # its call
        self._read = False  # the reference has been used
        self.failure: Failure | None = None
        self._future: CreationFuture | None = None  # once somebody has asked for it,
        self._uncompleted: CreationFuture | None = None  # and until it is completed
        self._span: Span | None = None
        self._scripted = False
        self._delayed: CallFuture[None] | None = None

    def __call__(self, outcome: tuple[Any, ...]) -> None:
        """The outcome of the call, as `Engine.next` gives it. Runs nobody's callbacks, but has the pool do so."""
        self.end(outcome)
        if self._uncompleted is not None:
            self._worker.pool.submit(self.complete)

    def end(self, outcome: tuple[Any, ...]) -> None:
        """The outcome of the call. Whoever has it completes the future."""
        if outcome[0] == _REPLIED and outcome[1] == _CREATED and not outcome[2] & _UNUSUAL:
            if self._span is not None or not self._worker.references.finish_creation(self, True):
                self.over(None)
            return
        try:
            self._worker.calls.result(outcome, self._request)
        except BaseException as e:
            self.over(e.with_traceback(None))
            if is_interrupt(e):  # the creation had to end first
                raise
        else:
            self.over(None, bool(outcome[2] & _FAILED))

    def over(self, error: BaseException | None, failed_there: bool = False) -> None:
        """The call has ended. A future made later ends with that.

        Args:
            error: what became of it, if that is no answer.
            failed_there: the owner keeps an exception instead of a value.
        """
        references = self._worker.references
        with references.lock:
            rref = self.rref
            if rref is None:
                self.early = error, failed_there
                return
        here = self._worker.info.id == self._request[0]
        if self._span is not None:
            self._span.end()
        if error is not None or failed_there:
            self.failure = Failure(error, self._read, self._request, _UNREAD, self._worker.calls)
        if isinstance(error, RpcTimeout):
            references.create_failed(rref, error, may_exist=error.state != "not sent" or here)
        elif error is not None and not isinstance(error, WorkerLost):  # a loss itself tells the protocol
            references.create_failed(rref, error, may_exist=False)
        references.finish_creation(self, error is None)

    # ---- past the interceptors

    def attach(self, span: Span) -> None:
        """Have a profile's record of the call end with it."""
        self._span = span

    def delayed(self, scripted: bool) -> CallFuture[None]:
        """A future of the call, for a fault injector."""
        self._scripted = scripted
        future: CallFuture[None] = CallFuture(NO_DEVICES)
        future._calls, future._request = self._calls, self._request
        future._read = True  # the creation tells who uses the reference
        self._delayed = future

        def over(_: Any) -> None:
            self.over(future.failure())
            self.complete()

        torch.futures.Future.add_done_callback(future, over)
        return future

    def watched(self, handle: Any) -> None:
        """Note in the reference what interceptors found."""
        if self._span is not None:
            handle._profiling = self.future()
        if self._delayed is not None:
            handle._scripted = self._scripted
            if not handle.is_owner():
                created, rref = self._worker.references.created, handle.id
                self._delayed._on_late_reply = lambda: created(rref)

    @property
    def made_class(self) -> type | None:
        """The class that is called to make the value, if it is one."""
        what = self._request[1]
        return what if isinstance(what, type) else None

    def done(self) -> bool:
        """Has the call ended?"""
        return self.ended

    def used(self) -> None:
        """Its reference is used: whoever does so hears of a failure."""
        self._read = True
        if self.failure is not None:
            self.failure.read = True

    def future(self) -> "CreationFuture":
        """The future of the call; always the same. Its value is None."""
        with self._worker.references.lock:
            if self._future is not None:
                return self._future
            future: CreationFuture = CreationFuture(NO_DEVICES)
            self._future = self._uncompleted = future
            future.creation = self
            future._calls, future._call, future._request = self._calls, self._call, self._request
            done = self.ended
        if done:
            self.complete()
        return future

    def complete(self) -> None:
        """The call has ended: so does the future, if there is one."""
        with self._worker.references.lock:
            future, self._uncompleted = self._uncompleted, None
        if future is None:
            return
        error = None if self.failure is None else self.failure.error
        if error is None:
            complete(future, None)
        else:
            future.set_exception(error)


class CreationFuture(CallFuture[Any]):
    """Of a call whose value stays where it is. Reading it counts as using the reference."""

    __slots__ = ("creation",)
    creation: PendingCreation

    def wait(self) -> Any:
        self.creation.used()
        return super().wait()

    def value(self) -> Any:
        self.creation.used()
        return super().value()

    def _failed(self, error: BaseException) -> Failure:
        failure = self.creation.failure
        return super()._failed(error) if failure is None else failure

    def __call__(self, outcome: tuple[Any, ...]) -> None:
        """The outcome, in the thread that waits for it."""
        self.creation.end(outcome)
        self.creation.complete()
