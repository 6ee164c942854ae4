"""The errors that Telegrad raises.

Every error is a ``RuntimeError``, because programs written for ``torch.distributed.rpc`` catch that. Every text says
what happened, where, and what to do. The facts are attributes too, so that a program does not have to parse the text.

The file is longer than others: it is the one table of the errors, each with its facts and an example.
"""

import concurrent.futures
import sys
from typing import Any, ClassVar, Final, Self

__all__ = [
    "Cancelled",
    "DeviceNotMapped",
    "MessageTooLarge",
    "NotExposed",
    "NotInitialized",
    "Overloaded",
    "OwnerLost",
    "PickleRefused",
    "RRefDeleted",
    "RRefError",
    "RRefNotPicklable",
    "RRefTimeout",
    "ReceiverOutOfMemory",
    "RemoteError",
    "RpcTimeout",
    "SerializationError",
    "ShutdownTimeout",
    "StreamError",
    "TelegradError",
    "UnknownWorker",
    "WorkerLost",
]


TEXT = "_telegrad_text"
"""Attribute of a remote exception with torch's text for it, under the drop-in."""

SHUT_DOWN: Final = "it shut down"
"""Reason of the loss of a worker after its goodbye; the text of csrc/core/peers_closing.cc."""

LEFT: Final = "it left the group"
"""Reason of the loss of a worker that the group has removed after its shutdown."""


def is_drop_in() -> bool:
    """Return whether ``torch.distributed.rpc`` is Telegrad in this process.

    If so, texts and printed lines are those of torch.
    """
    return getattr(sys.modules.get("torch.distributed.rpc"), "__name__", "").startswith("telegrad.")


class TelegradError(RuntimeError):
    """Base class of all errors that Telegrad raises.

    Example::

        try:
            rpc.rpc_sync("worker1", max, args=(1, 2))
        except errors.TelegradError as error:  # any error of Telegrad
            print(error)
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Constructors of subclasses build the text from facts; the pickle has the text and the facts.
        return rebuild, (type(self), self.args, self.__dict__.copy())


def rebuild(kind: type[BaseException], args: tuple[Any, ...], facts: dict[str, Any]) -> BaseException:
    """Create an error from its arguments and attributes, without its constructor."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(facts)
    return error


class NotInitialized(TelegradError):
    """A call was made in a process, or on a worker, that is not in a group.

    Args:
        message: Text instead of the default, for functions that have another text in torch.

    Example::

        try:
            rpc.rpc_sync("worker1", max, args=(1, 2))
        except errors.NotInitialized:
            print("call init_rpc first")
    """

    CALL = "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."  # torch's text
    AGENT = "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"

    inherited: ClassVar[str] = ""
    """Reason that this process cannot use the workers that it knows, if it is a fork and has no worker of its own."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or self._default())

    @classmethod
    def _default(cls) -> str:
        if cls.inherited:
            return f"{cls.CALL} ({cls.inherited})" if is_drop_in() else cls.inherited
        return _for_drop_in("RPC has not been initialized, or has shut down. Call telegrad.rpc.init_rpc first.")

    @classmethod
    def closed(cls, why: str = "") -> Self:
        """Return the error of a use of a worker that has shut down.

        Args:
            why: The use, or the reason of the shutdown.
        """
        text = _for_drop_in("This RPC worker has shut down. Call telegrad.rpc.init_rpc to join a group again.")
        return cls(f"{text} ({why})" if why else text)


def _for_drop_in(text: str) -> str:
    """Return a text of NotInitialized; under the drop-in, torch's."""
    return NotInitialized.CALL if is_drop_in() else text


class UnknownWorker(TelegradError):
    """A call names a worker that is not in the group.

    Args:
        caller: Name and rank of the worker that made the call.
        wanted: The unknown name or rank.
        known: The names of the workers in the group.

    Example::

        try:
            rpc.rpc_sync("worker9", max, args=(1, 2))
        except errors.UnknownWorker as error:
            print(error.wanted, error.known)
    """

    def __init__(self, caller: tuple[str, int], wanted: str | int, known: tuple[str, ...] = ()) -> None:
        self.wanted = wanted
        self.known = known
        what = f"name {wanted}" if isinstance(wanted, str) else f"id {wanted}"
        there = f" The group's workers are: {', '.join(known)}." if known else ""
        super().__init__(
            f"name:{caller[0]},rank:{caller[1]} could not find destination {what}.{there}"
            " Check the spelling, and that the worker has joined."
        )


_REMEDY_BY_STATE: Final = {
    "waiting": "Start the callee earlier, or raise connect_timeout or request_window_bytes in the options.",
    "queued": "Raise num_worker_threads of the callee, or pass a larger timeout= (0 means no limit). A use of a"
    " reference also waits here until its value has been created.",
    "reply lost": "Pass a larger timeout= (0 means no limit), or check the network.",
    "unknown": "The callee has not answered: check whether its process is stopped, and the network.",
}


_NO_TIME: Final = 1e-9  # s; timeout of a call for which no time was left: the deadline of the request had passed
_NO_TIME_LEFT: Final = (
    "The deadline of the running request, which its calls share, had passed before this call was sent, or its own"
    " timeout was less than 2 ns. Give the request a larger timeout= (0 means no limit)."
)


class RpcTimeout(TelegradError, TimeoutError):
    """A call did not finish within its timeout. It is a ``TimeoutError`` as well.

    Args:
        timeout: The timeout in seconds.
        call: Function and callee, for example ``"torch.add on ps0"``.
        state: How far the call had come: ``"waiting"`` (not sent: no connection, or too many requests at the callee),
            ``"queued"`` (never ran; it may have waited for the value of a reference), ``"running"`` (still runs, and
            has been notified), ``"reply lost"`` (ran), ``"intercepted"`` (an interceptor's own future was not done),
            ``"unknown"``; or another operation's text.
        remedy: What the user can do; by default, what helps in this state.

    Example::

        try:
            rpc.rpc_sync("worker1", time.sleep, args=(0.2,), timeout=0.01)
        except errors.RpcTimeout as error:
            print(error.timeout, error.call, error.state)  # 0.01 time.sleep on worker1 running
    """

    LARGER = "Pass a larger timeout= (0 means no limit) if the call may take that long."

    def __new__(cls, *_args: object, **_facts: object) -> Self:
        # Of the two bases OSError has the larger layout, and its constructor would interpret arguments as an errno.
        return OSError.__new__(cls)

    def __init__(self, timeout: float, call: str = "", state: str = "", remedy: str = "") -> None:
        self.timeout = timeout
        self.call = call
        self.state = state
        details = "; ".join(filter(None, (call, "state unknown" if state == "unknown" else state)))
        limit = f"{timeout * 1000:.6g} ms" if timeout < 1 else f"{round(timeout * 1000)} ms"
        if 0 < timeout <= _NO_TIME:
            limit, remedy = "0 ms left", _NO_TIME_LEFT
        super().__init__(
            f"RPC ran for more than set timeout ({limit}) and will now be marked with an error"
            + (f" ({details})" if details else "")
            + f". {remedy or _REMEDY_BY_STATE.get(state, self.LARGER)}"
        )


class Cancelled(TelegradError, concurrent.futures.CancelledError):
    """A call was canceled. It is a ``concurrent.futures.CancelledError`` as well.

    `CallFuture.cancel` has this effect. In a canceled task, ``await`` raises ``asyncio.CancelledError`` instead.

    Args:
        call: Function and callee, for example ``"torch.add on ps0"``.

    Example::

        future = rpc.rpc_async("worker1", time.sleep, args=(0.2,))
        future.cancel()
        try:
            future.wait()
        except errors.Cancelled as error:
            print(error.call)  # time.sleep on worker1
    """

    def __init__(self, call: str = "") -> None:
        self.call = call
        super().__init__(f"{call or 'the call'} was canceled: its result is not available")


class WorkerLost(TelegradError):
    """The callee was lost; it may or may not have run the call.

    `telegrad.rpc.barrier`, ``all_gather`` and ``broadcast`` raise it if a worker that takes part is lost or has left.

    Args:
        name: The callee's name.
        why: Reason, for example ``"connection closed by peer (process 4711 died)"``.
        incarnation: The process that was lost, not one that has replaced it; 0 if it was never known. Of two processes
            of one name, the later one has the greater number.

    Example::

        with cluster(2, graceful=False) as group:
            group[1].shutdown(graceful=False)
            try:
                rpc.rpc_sync("w1", max, args=(1, 2))
            except errors.WorkerLost as error:
                print(error.name, error.why)
    """

    _loss: int = 0  # a `telegrad.wire.Loss`, if a completion of the core has reported the loss

    def __init__(self, name: str, why: str, incarnation: int = 0) -> None:
        self.name = name
        self.why = why
        self.incarnation = incarnation
        super().__init__(
            f"worker {name} is lost: {why}. It may or may not have run the calls that were waiting for it. See the"
            " worker's own output for the cause. Telegrad makes only calls with retry=rpc.Retry() again."
        )

    @property
    def left(self) -> bool:
        """Whether the worker left after a shutdown instead of dying."""
        return self.why in (SHUT_DOWN, LEFT)

    @property
    def unreached(self) -> bool:
        """Whether only the connection timed out, so that the worker may be alive."""
        return self.why.startswith("no connection to worker")  # text of the core

    @property
    def silent(self) -> bool:
        """Whether the worker gave no sign of life.

        It may be stopped, or cut off by the network.
        """
        return self.why.startswith("it gave no sign of life")  # text of the core, csrc/core/detector.cc


class OwnerLost(WorkerLost):
    """The value of a remote reference was lost with the worker that owned it.

    Example::

        with cluster(2, graceful=False) as group:
            layer = rpc.remote("w1", torch.nn.Linear, args=(3, 1))
            layer.to_here()
            group[1].shutdown(graceful=False)
            try:
                layer.to_here()
            except errors.OwnerLost as error:
                print(error.name, error.why)
    """

    def __init__(self, name: str, why: str, rref: str = "", incarnation: int = 0) -> None:
        super().__init__(name, why, incarnation)
        self.rref = rref
        what = f"the value of {rref}" if rref else "the value of a remote reference"
        self.args: tuple[Any, ...] = (
            f"{what} was lost with its owner, worker {name}: {why}. Create it again on another worker.",
        )


class SerializationError(TelegradError):
    """An argument, a result or a function could not be serialized or deserialized.

    Example::

        try:
            rpc.rpc_sync("worker1", print, args=(threading.Lock(),))
        except errors.SerializationError as error:
            print(error)
    """


class PickleRefused(SerializationError):
    """A value would have to be pickled, or has arrived as a pickle.

    A worker with the option ``allow_pickle=False`` sends plain data and tensors only, and loads no pickles.

    Example::

        with cluster(2, rpc.Options(allow_pickle=False)):
            try:
                rpc.rpc_sync("w1", print, args=(object(),))
            except errors.PickleRefused as error:
                print(error)
    """


class NotExposed(TelegradError):
    """A call names a function or method that its worker does not expose.

    The worker has the option ``expose="listed"``, and runs only what
    `telegrad.rpc.expose` has listed there. Nothing has run.

    Args:
        worker: Name of the callee.
        what: What the call named.
        remedy: How the callee can expose it.

    Example::

        with cluster(2, rpc.Options(expose="listed")):
            try:
                rpc.rpc_sync("w1", eval, args=("1 + 1",))
            except errors.NotExposed as error:
                print(error)
    """

    def __init__(self, worker: str, what: str, remedy: str) -> None:
        super().__init__(f"worker {worker} does not expose {what} to calls (option expose). {remedy}")


class MessageTooLarge(SerializationError):
    """A message exceeds the receiver's limits and was not sent.

    It is a request, a result or an exception. The limits are the options ``max_message_bytes`` and ``max_header_bytes``
    of the receiver. Other calls between the two workers are not affected.

    Example::

        with cluster(2, rpc.Options(max_message_bytes=1 << 20)):
            try:
                rpc.rpc_sync("w1", torch.sum, args=(torch.ones(1 << 20),))  # 4 MiB
            except errors.MessageTooLarge as error:
                print(error)
    """


class ReceiverOutOfMemory(TelegradError, MemoryError):
    """A worker had no memory for a request or a result that arrived.

    It is a ``MemoryError`` as well.

    If the arguments could not be received, the function has not run. Other calls between the two workers are not
    affected.

    Example::

        try:
            rpc.rpc_sync("worker1", torch.sum, args=(torch.ones(1000),))
        except errors.ReceiverOutOfMemory:
            print("send it in parts")
    """


class Overloaded(TelegradError):
    """A worker has too much to do, or would keep too much at once.

    The call has not run. Other calls are not affected, and the session with the callee goes on: make the call again
    when results have arrived. ``docs/limits.md`` lists the limits.

    Args:
        limit: Name of the option that sets the limit, for example ``"max_call_depth"``.
        message: What has reached the limit, and what to do.

    Example::

        def descend(levels):
            return levels and rpc.rpc_sync("worker1", descend, args=(levels - 1,))

        try:
            descend(1000)
        except errors.Overloaded as error:
            print(error.limit)  # max_call_depth
    """

    def __init__(self, limit: str, message: str) -> None:
        self.limit = limit
        super().__init__(message)


class DeviceNotMapped(SerializationError):
    """A tensor is on a device from which it cannot be sent.

    Example::

        if torch.cuda.is_available():
            try:
                rpc.rpc_sync("worker1", torch.sum, args=(torch.ones(2, device="cuda"),))
            except errors.DeviceNotMapped:
                print("send a copy: tensor.cpu()")
    """


class ShutdownTimeout(TelegradError):
    """A graceful shutdown ended before all workers took part, or had done their work.

    Args:
        timeout: The timeout in seconds.
        missing: Names of the workers that did not begin to shut down, or did not reply; empty if only work was left.
        gave_up: The missing workers had begun to shut down, but timed out and left before this worker began.

    Example::

        with cluster(2, graceful=False) as group:
            try:
                group[0].shutdown(timeout=0.1)
            except errors.ShutdownTimeout as error:
                print(error.missing)  # ('w1',)
    """

    def __init__(self, timeout: float, missing: tuple[str, ...] = (), gave_up: bool = False) -> None:
        self.timeout = timeout
        self.missing = missing
        self.gave_up = gave_up
        if gave_up:
            what = f"graceful shutdown failed: other workers timed out and left before ({', '.join(missing)})"
        else:
            names = f"still missing: {', '.join(missing)}" if missing else "calls or requests are still pending"
            what = f"graceful shutdown gave up after {timeout:g} s; {names}"
        super().__init__(f"{what}. This worker is shut down nevertheless.")


class StreamError(TelegradError):
    """A stream was used in a way that it does not support.

    Two threads or tasks read it at once, or it was read again after its end or after `telegrad.rpc.Stream.close`.

    Example::

        letters = rpc.stream("worker1", iter, args=("abc",))
        print(list(letters))  # ['a', 'b', 'c']
        try:
            list(letters)
        except errors.StreamError as error:
            print(error)  # the stream of iter on worker1 was read to its end ...
    """


class RRefError(TelegradError):
    """An operation on a remote reference failed.

    Example::

        rref = rpc.remote("worker1", torch.nn.Linear, args=(3, 1))
        try:
            rref.local_value()  # the value is on worker1
        except errors.RRefError as error:
            print(error)
    """


class RRefTimeout(RRefError):
    """The call that creates the value timed out, so the reference may have no value.

    Example::

        rref = rpc.remote("worker1", time.sleep, args=(0.2,), timeout=0.01)
        try:
            rref.to_here()
        except errors.RRefTimeout as error:
            print(error.rref)
    """

    def __init__(self, rref: str = "") -> None:
        self.rref = rref
        super().__init__(
            "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node does not"
            " exist." + (f" ({rref})" if rref else "")
        )


class RRefDeleted(RRefError):
    """A remote reference was used after its release.

    A shutdown releases all references.

    Example::

        with cluster(2):
            rref = rpc.remote("w1", torch.nn.Linear, args=(3, 1))
            rref.to_here()
        try:
            rref.to_here()
        except errors.RRefDeleted as error:
            print(error)
    """


class RRefNotPicklable(RRefError):
    """A remote reference was pickled or copied outside of a remote call.

    Only a call can count the copy.

    Example::

        try:
            pickle.dumps(rpc.RRef(torch.ones(2)))
        except errors.RRefNotPicklable as error:
            print(error)
    """

    def __init__(self) -> None:
        super().__init__("Can not pickle rref in python pickler, rref can only be pickled when using RPC")


class RemoteError(TelegradError):
    """An exception that a remote function raised.

    The caller gets an exception of a class that is both this class and the original type. So ``except KeyError`` and
    ``except RuntimeError`` both catch a remote ``KeyError``. ``str()``, ``args`` and attributes are those of the
    original. If the original cannot be rebuilt, the caller gets a plain ``RemoteError`` with a note that gives the
    reason. The remote traceback is its ``__cause__``, so Python prints it once, above the caller's traceback.

    Under the drop-in ``str()`` is torch's text: the worker, the original's ``repr``, the traceback.

    Attributes:
        worker: Name of the callee. If the callee forwarded an exception of a third worker, the traceback names that
            worker.
        worker_id: Rank of the callee.
        original_type: Name of the original type, with its module.
        remote_traceback: Traceback of the callee, as Python prints it.

    If the original has an attribute of one of these names, ``error.worker`` for example is the original's. The
    ``__cause__`` always has all four: ``error.__cause__.worker`` is the callee.

    Example::

        try:
            rpc.rpc_sync("worker1", int, args=("x",))
        except ValueError as error:
            assert isinstance(error, errors.RemoteError)
            print(error.worker, error.original_type)  # worker1 builtins.ValueError
    """

    worker: str = ""
    worker_id: int = -1
    original_type: str = ""
    remote_traceback: str = ""

    def __str__(self) -> str:
        return self.__dict__.get(TEXT) or super().__str__()
