"""The numbers of the wire, which Python and the core write down each."""

from telegrad import _core, wire


def test_the_core_has_the_same_numbers() -> None:
    assert _core.WIRE
    for (table, name), number in _core.WIRE.items():
        assert int(getattr(wire, table)[name]) == number, f"{table}.{name}"
