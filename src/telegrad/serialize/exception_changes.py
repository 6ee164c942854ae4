"""Changes that a program makes to an exception of another worker.

They are notes, attributes, and other ``args``. The exception travels on as its first message, to which the changes are
added.
"""

from collections.abc import Callable
from typing import NamedTuple

from telegrad.serialize.plain_exceptions import decode_facts, encode_facts
from telegrad.serialize.tracebacks import is_interrupt, show_exception

__all__ = ["apply_changes", "copy_facts", "mark_arrival", "notes_of", "pack_changes"]

_ARRIVED = "_telegrad_arrived"
_LOCAL = "_telegrad_"  # prefix of attributes that stay in this process
_NOTES = "__notes__"


class _Arrived(NamedTuple):
    """State of an exception before the program has it.

    Changes are found by identity, because values may not be comparable.
    """

    args: tuple[object, ...]
    attributes: dict[str, object]
    notes: int


def notes_of(exc: BaseException) -> list[str]:
    """Return the notes of an exception; user code may have set something else."""
    notes = exc.__dict__.get(_NOTES)
    return [each for each in notes if isinstance(each, str)] if isinstance(notes, list | tuple) else []


def mark_arrival(exc: BaseException) -> None:
    """Record the state from which `pack_changes` finds changes."""
    exc.__dict__[_ARRIVED] = _Arrived(exc.args, dict(exc.__dict__), len(notes_of(exc)))


def pack_changes(exc: BaseException, dump: Callable[[object], bytes] | None) -> bytes | None:
    """Encode the arguments, and the new attributes and notes.

    Args:
        exc: The exception.
        dump: Pickles a value that is not plain data; None if pickles are not sent.

    Returns:
        The data; None if nothing has changed.
    """
    arrived = exc.__dict__.get(_ARRIVED)
    if not isinstance(arrived, _Arrived):
        return None
    before = arrived.attributes
    attributes: dict[str, object] = {
        name: value
        for name, value in exc.__dict__.items()
        if name != _NOTES and not name.startswith(_LOCAL) and (name not in before or before[name] is not value)
    }
    if notes := notes_of(exc)[arrived.notes :]:
        attributes[_NOTES] = notes
    if not attributes and exc.args is arrived.args:
        return None
    return encode_facts(exc.args, attributes, dump)[0]


def apply_changes(exc: BaseException, data: bytes, load: Callable[[bytes], object]) -> bool:
    """Repeat the changes of `pack_changes` on an exception that has arrived.

    Returns:
        False if the data cannot be read; a note of the exception says so.
    """
    try:
        args, attributes = decode_facts(data, load)
    except BaseException as e:  # user code, or a malicious sender
        if is_interrupt(e):
            raise
        exc.__dict__[_NOTES] = [*notes_of(exc), f"What other workers have added to it is lost: {show_exception(e)}"]
        return False
    notes = attributes.pop(_NOTES, ())
    BaseException.__setattr__(exc, "args", args)  # also on a class that forbids setting attributes
    exc.__dict__.update({name: value for name, value in attributes.items() if not name.startswith(_LOCAL)})
    if isinstance(notes, list):
        exc.__dict__[_NOTES] = notes_of(exc) + [each for each in notes if isinstance(each, str)]
    return True


def copy_facts(exc: BaseException, again: BaseException) -> None:
    """Give a copy the arguments and attributes of an exception, and notes of its own."""
    BaseException.__setattr__(again, "args", exc.args)
    again.__dict__.clear()
    again.__dict__.update(exc.__dict__)
    if isinstance(exc.__dict__.get(_NOTES), list):
        again.__dict__[_NOTES] = exc.__dict__[_NOTES].copy()
