"""Serialization errors that are also of the type that pickle has raised."""

from telegrad.errors import SerializationError

_both: dict[type[Exception], type[SerializationError]] = {}


def as_serialization_error(kind: type[Exception]) -> type[SerializationError]:
    """Return a SerializationError that is also `kind`, which pickle has raised."""
    if issubclass(kind, SerializationError):
        return kind
    if issubclass(SerializationError, kind):
        return SerializationError
    if kind not in _both:
        try:
            members = {"__module__": SerializationError.__module__, "__reduce__": _reduce_both}
            both = type("SerializationError", (SerializationError, kind), members)
        except TypeError:  # the instance layouts conflict
            both = SerializationError
        _both[kind] = both
    return _both[kind]


def _reduce_both(error: SerializationError) -> tuple[object, ...]:
    """Reduce the error to its original type; its own class cannot be found by name."""
    return _both_again, (type(error).__bases__[1], error.args)


def _both_again(kind: type[Exception], args: tuple[object, ...]) -> SerializationError:
    return as_serialization_error(kind)(*args)
