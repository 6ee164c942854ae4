"""Files are short, or say why not, and types are precise."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 450
ANY_PER_1000 = 20.0
GENERATED = {"csrc/wire/constants.h"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def sources() -> list[Path]:
    found = [path for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")]
    found += [path for kind in ("cc", "h") for path in (ROOT / "csrc").rglob(f"*.{kind}")]
    return [path for path in sorted(found) if name_of(path) not in GENERATED]


def header_of(path: Path) -> str:
    """Return the docstring of a Python file, or the comment at the top of another one."""
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(path.read_text())) or ""
    lines = path.read_text().splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("//")), len(lines))
    return " ".join(line.removeprefix("//").strip() for line in lines[:end])


def test_files_are_short_or_say_why_not() -> None:
    paths = sources()
    assert len(paths) > 300
    long = [path for path in paths if path.read_text().count("\n") > MOST_LINES]
    unexplained = [name_of(path) for path in long if "longer than others" not in " ".join(header_of(path).split())]
    assert not unexplained, f"split them, or say in the header why 'the file is longer than others': {unexplained}"


@pytest.mark.parametrize("folder", ["src/telegrad"])
def test_few_types_are_any(folder: str) -> None:
    lines = uses = 0
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text()
        lines += text.count("\n")
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        uses += sum(token.type == tokenize.NAME and token.string == "Any" for token in tokens)
    assert uses <= ANY_PER_1000 * lines / 1000, f"{uses} uses in {lines} lines"
