"""Instructions per call, counted by callgrind."""

import pytest

from bench.instructions import PARTS, TOLERANCE, CannotCount, Change, check_possible, compare, recorded_counts


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", PARTS)
def test_no_call_takes_more_instructions_than_recorded(part: str) -> None:
    try:
        check_possible()
        recorded = recorded_counts(part)
    except CannotCount as e:
        pytest.skip(str(e))
    counted = PARTS[part]()
    assert counted.keys() == recorded.keys(), "record them: python -m bench.instructions --record"
    increased = [str(change) for change in compare(recorded, counted) if change.growth > TOLERANCE]
    assert not increased, "if that is worth it, python -m bench.instructions --record"


def test_growth_is_relative_to_what_was_recorded() -> None:
    same, more, new = compare({"a": 100.0, "b": 100.0}, {"a": 100.0, "b": 103.0, "c": 5.0})
    assert same == Change("a", 100.0, 100.0)
    assert same.growth == new.growth == 0
    assert more.growth == pytest.approx(0.03)
    assert more.growth > TOLERANCE
