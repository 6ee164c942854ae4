"""Parts of the request of a call that Python encodes."""

from telegrad.protocols.rref import Ticket
from telegrad.serialize.program_pickler import BodyPickler, ByPickler
from telegrad.wire.ints import FLAG_INTERNAL, FLAG_KEEP_AS, FLAG_MUST_DELIVER, FLAG_MUST_RUN, FLAG_RECEIVER
from telegrad.worker.calls.callables import name_of
from telegrad.worker.calls.interception import CallForm
from telegrad.worker.calls.interceptors import carrier_of

__all__ = ["body_of", "flags_of", "label_of", "ticket_for"]

_PARTS: tuple[str, ...] = ("args", "kwargs")
_PARTS_BY_VALUE = ("the function", *_PARTS)


def label_of(call: CallForm) -> object:
    """Return the function of a call, or its name, for error texts."""
    function = call.function
    if call.receiver is None:
        return name_of(function)
    return "to_here" if function is None else "the type of a value" if function is type else function


def flags_of(call: CallForm) -> int:
    """Return the flags of a request that its call alone decides."""
    flags = 0
    if call.internal or (call.receiver is not None and call.function is type):
        flags |= FLAG_INTERNAL
    if call.keep_as is not None:
        flags |= FLAG_KEEP_AS | FLAG_MUST_DELIVER | FLAG_MUST_RUN  # even after a timeout: others may know the reference
    if call.receiver is not None:
        flags |= FLAG_RECEIVER
    return flags


def body_of(call: CallForm, pickler: BodyPickler | None, by_value: bool) -> tuple[tuple[str, ...], object]:
    """Return the names of a body's parts, for errors, and the body.

    Args:
        call: The call.
        pickler: The program's pickler of the arguments.
        by_value: The function has no name. A call with a receiver never has such a function.
    """
    args, kwargs = call.args, call.kwargs
    parts = _PARTS
    before: tuple[object, ...] = ()
    after: tuple[object, ...] = ()
    if by_value and call.receiver is None:
        parts, before = _PARTS_BY_VALUE, (call.function,)
    if call.keep_as is not None:
        parts, after = (*parts, "the local id"), (call.keep_as,)
    if call.receiver is not None:
        parts, after = (*parts, "the receiver"), (*after, tuple(call.receiver.id))
    if pickler is None:
        return parts, (*before, args, kwargs, *after)
    carrier = carrier_of(call.function)
    if carrier is not None and not pickler.carries_function:
        carried, args, kwargs = carrier.split(args)
        before = (*before, carried)
    return parts, ByPickler(before, pickler.call(call.function, args, kwargs), after)


def ticket_for(call: CallForm) -> tuple[Ticket | None, int | None]:
    """Return the ticket that introduces a receiver to its owner, and the epoch.

    Both are None if the owner knows the receiver.
    """
    receiver = call.receiver
    if receiver is None or (call.keep_as is None and not receiver.is_unknown()):
        return None, None
    references = receiver.worker.references
    epoch = references.epoch_of(call.peer)
    return references.share(receiver.id, call.peer, call.peer, epoch), epoch
