"""The errors that Telegrad raises.

Every one is a ``RuntimeError``, because that is what programs written for
``torch.distributed.rpc`` catch, and every one says what happened, where, and what to do about it.
The facts are kept as attributes too, so that a program need not read them out of the text.
"""

import sys
from typing import Any, Self

__all__ = [
    "DeviceNotMapped",
    "HandshakeError",
    "MessageTooLarge",
    "NotInitialized",
    "OwnerLost",
    "ProtocolError",
    "RRefDeleted",
    "RRefError",
    "RRefNotPicklable",
    "RRefTimeout",
    "ReceiverOutOfMemory",
    "RemoteError",
    "RpcTimeout",
    "SerializationError",
    "ShutdownTimeout",
    "TelegradError",
    "UnknownWorker",
    "WorkerLost",
]


TEXT = "_telegrad_text"
"""The attribute of a remote exception that has torch's text for it, under the drop-in."""


def is_drop_in() -> bool:
    """Tell whether ``torch.distributed.rpc`` is Telegrad in this process. Texts and printed lines are torch's then."""
    return getattr(sys.modules.get("torch.distributed.rpc"), "__name__", "").startswith("telegrad.")


class TelegradError(RuntimeError):
    """The root of everything that Telegrad itself raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses take facts and make the text from them; what travels is the text and the facts.
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], facts: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(facts)
    return error


class NotInitialized(TelegradError):
    """A call was made in a process (or on a worker) that is not part of a group, or is so no longer.

    Args:
        message: another text than the default, for the places where programs know another one.
    """

    CALL = "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."
    AGENT = "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"

    def __init__(self, message: str = CALL) -> None:
        super().__init__(message)


class UnknownWorker(TelegradError):
    """A call names a worker that is not in the group.

    Args:
        caller: the worker that asked, as ``name`` and ``rank``.
        wanted: the name or the rank asked for.
        known: the names of the workers that are there.
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


class RpcTimeout(TelegradError, TimeoutError):
    """A call did not finish in its time. It is a ``TimeoutError`` as well.

    Args:
        timeout: the time-out in seconds.
        call: what was called, for example ``"torch.add on ps0"``.
        state: how far it got: ``"not sent"``, ``"queued"``, ``"running"``, ``"reply lost"``; empty if not known.
        remedy: what to do about it.
    """

    LARGER = "Pass a larger timeout= (0 waits for ever) if the call may take that long."

    def __new__(cls, *_args: object, **_facts: object) -> Self:
        # Of the two bases OSError has the larger layout, and its constructor would make an errno of the arguments.
        return OSError.__new__(cls)

    def __init__(self, timeout: float, call: str = "", state: str = "", remedy: str = LARGER) -> None:
        self.timeout = timeout
        self.call = call
        self.state = state
        details = "; ".join(filter(None, (call, state)))
        super().__init__(
            f"RPC ran for more than set timeout ({_milliseconds(timeout)} ms) and will now be marked with an error"
            + (f" ({details})" if details else "")
            + f". {remedy}"
        )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.6g}" if seconds < 1 else str(round(seconds * 1000))


class WorkerLost(TelegradError):
    """The worker that a call was made to is gone; the call may or may not have run there.

    Args:
        name: the worker's name.
        why: what was seen of its end, for example ``"connection closed by peer (process 4711 died)"``.
    """

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        self.why = why
        super().__init__(
            f"worker {name} is lost: {why}. Calls that waited for it may or may not have run there; Telegrad does"
            " not repeat them. Look at that worker's own output for the cause."
        )

    @property
    def left(self) -> bool:
        """Did it say goodbye (and not die)?"""
        return self.why == "it shut down"  # the core's words, csrc/core/engine_peers.cc

    @property
    def unreached(self) -> bool:
        """Was there just no connection in time? The worker may live."""
        return self.why.startswith("no connection to worker")  # the core's words as well


class OwnerLost(WorkerLost):
    """The value behind a remote reference is gone, because the worker that owned it is."""

    def __init__(self, name: str, why: str, rref: str = "") -> None:
        super().__init__(name, why)
        self.rref = rref
        what = f"the value of {rref}" if rref else "the value of a remote reference"
        self.args: tuple[Any, ...] = (
            f"{what} went with its owner, worker {name}, which is lost: {why}. Create it anew elsewhere.",
        )


class SerializationError(TelegradError):
    """An argument, a result or a function could not be put into a message, or not taken out of one."""


class MessageTooLarge(SerializationError):
    """A request, a result or an exception is over the limits of the worker that it goes to, and has not been sent.

    The options ``max_message_bytes`` and ``max_header_bytes`` of that worker are its limits. Other calls, and what
    else the two workers share, go on.
    """


class ReceiverOutOfMemory(TelegradError, MemoryError):
    """A worker had no memory for a request or a result that came. It is a ``MemoryError`` as well.

    A function whose arguments could not be taken has not run. Other calls, and what else the two workers share, go on.
    """


class DeviceNotMapped(SerializationError):
    """A tensor lies on a device from which it cannot be sent."""


class HandshakeError(TelegradError):
    """Two processes could not agree to be members of one group.

    Args:
        peer: the address or name of the other side.
        why: what did not fit.
        remedy: what to do about it.
    """

    def __init__(self, peer: str, why: str, remedy: str = "") -> None:
        self.peer = peer
        self.why = why
        super().__init__(f"handshake with {peer} failed: {why}." + (f" {remedy}" if remedy else ""))


class ProtocolError(TelegradError):
    """A peer sent bytes that make no sense. Its connection is closed; the others are not touched."""

    def __init__(self, peer: str, why: str) -> None:
        self.peer = peer
        self.why = why
        super().__init__(f"{peer} sent a message that cannot be understood: {why}. Its connection was closed.")


class ShutdownTimeout(TelegradError):
    """A graceful shutdown ended before all workers had come.

    Args:
        timeout: the time-out in seconds.
        missing: names of the workers that did not come.
        gave_up: they did come, but gave up, and left before this worker came.
    """

    def __init__(self, timeout: float, missing: tuple[str, ...] = (), gave_up: bool = False) -> None:
        self.timeout = timeout
        self.missing = missing
        self.gave_up = gave_up
        if gave_up:
            what = f"graceful shutdown failed: when this worker came, some had given up and left ({', '.join(missing)})"
        else:
            who = f"; still missing: {', '.join(missing)}" if missing else ""
            what = f"graceful shutdown gave up after {timeout:g} s{who}"
        super().__init__(f"{what}. This worker is shut down all the same.")


class RRefError(TelegradError):
    """A remote reference cannot do what it was asked to."""


class RRefTimeout(RRefError):
    """The remote call that should have made the value timed out, so there may be no value to refer to."""

    def __init__(self, rref: str = "") -> None:
        self.rref = rref
        super().__init__(
            "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node does not"
            " exist." + (f" ({rref})" if rref else "")
        )


class RRefDeleted(RRefError):
    """A remote reference was used after it was given up, which shutting down also does."""


class RRefNotPicklable(RRefError):
    """A remote reference was pickled or copied outside of a remote call, where nobody could count it."""

    PICKLE = "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
    UNPICKLE = "Can not unpickle rref in python pickler, rref can only be unpickled when using RPC"

    def __init__(self, message: str = PICKLE) -> None:
        super().__init__(message)


class RemoteError(TelegradError):
    """What a remote call raised.

    The exception that arrives is of a class made for the purpose, which is both this one and the
    type that was raised over there (``except KeyError`` and ``except RuntimeError`` both catch a
    remote ``KeyError``); ``str()``, ``args`` and attributes are those of the original. When the
    original cannot be made again, a plain ``RemoteError`` arrives, with a note that says why. The
    remote traceback is its ``__cause__``, so Python prints it once, above the caller's.

    Under the drop-in ``str()`` is torch's text: the worker, the original's ``repr``, the traceback.

    Attributes:
        worker: name of the worker that this worker called; where that one passed on what a further worker raised,
            its traceback names that one.
        worker_id: rank of that worker.
        original_type: the name of the type that was raised, with its module.
        remote_traceback: the traceback over there, as Python prints it.
    """

    worker: str = ""
    worker_id: int = -1
    original_type: str = ""
    remote_traceback: str = ""

    def __str__(self) -> str:
        return self.__dict__.get(TEXT) or super().__str__()
