"""The lists of the conformance suite agree with one another."""

from pathlib import Path

LISTS = Path(__file__).parent.parent / "conformance"


def rows(name: str) -> list[list[str]]:
    return [line.split(None, 1) for line in (LISTS / name).read_text().splitlines() if line and line[0] != "#"]


def ids(name: str) -> list[str]:
    return [row[0] for row in rows(name)]


def test_what_is_flaky_counts_all_the_same() -> None:
    assert set(ids("flaky.txt")) <= set(ids("open.txt")) - set(ids("known.txt"))


def test_every_known_failure_has_its_reason() -> None:
    everything = set(ids("classes.tsv"))
    for row in rows("known.txt"):
        assert row[0] in everything
        assert len(" ".join(row[1:]).split()) > 4, f"{row[0]} needs a sentence"


def test_no_test_is_listed_twice() -> None:
    for name in ("open.txt", "classes.tsv", "known.txt"):
        assert len(ids(name)) == len(set(ids(name)))
