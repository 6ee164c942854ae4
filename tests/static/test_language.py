"""STYLE.md's rules on words hold, and their checker finds breaches."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from language import (
    OLD_NAMES,
    OLD_WORDS,
    PRONOUNS_PER_1000,
    Breach,
    core_comment_breaches,
    docstring_breaches,
    pronouns,
    word_breaches,
)

REPO = Path(__file__).parents[2]
CODE = ("src", "csrc", "tests", "bench", "examples", "tools")
QUOTING = {"STYLE.md", "GLOSSARY.md", "tests/static/language.py", "tests/static/test_language.py"}
"""Files that name the banned words, and the changelog, which is history."""

PENDING: tuple[str, ...] = ()
"""Files and folders that the rules do not cover yet."""


def tracked() -> list[Path]:
    """List the files of the repository, new ones included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout
    return sorted({path for name in listed.split("\0") if name and (path := REPO / name).is_file()})


def name_of(path: Path) -> str:
    return str(path.relative_to(REPO))


def is_pending(path: Path) -> bool:
    return any(path.is_relative_to(REPO / one) for one in PENDING)


FILES = [path for path in tracked() if name_of(path) not in QUOTING and not is_pending(path)]
SOURCES = [path for path in FILES if path.suffix in (".py", ".pyi", ".cc", ".h", ".sh")]
SETTINGS = [path for path in FILES if path.suffix in (".toml", ".txt", ".yml", ".cmake") or path.name == "Makefile"]
DOCUMENTS = [path for path in FILES if path.suffix == ".md"]


def report(found: Iterable[tuple[Path, Breach]]) -> str:
    return "\n".join(f"{name_of(path)}:{breach}" for path, breach in found)


def test_sources_and_documents_are_found() -> None:
    assert {"README.md", "docs/rpc.md"} <= {name_of(path) for path in DOCUMENTS}
    assert {name_of(path).partition("/")[0] for path in SOURCES} >= set(CODE)


def test_no_file_has_banned_words() -> None:
    found = [(path, breach) for path in SOURCES + SETTINGS for breach in word_breaches(path.read_text(), code=True)]
    found += [(path, breach) for path in DOCUMENTS for breach in word_breaches(path.read_text(), code=False)]
    assert not found, report(found)


def test_file_names_have_no_banned_words() -> None:
    found = [(path, breach) for path in FILES for breach in word_breaches(name_of(path), code=True)]
    assert not found, report(found)


@pytest.mark.parametrize("folder", CODE)
def test_code_has_few_pronouns(folder: str) -> None:
    assert_few([path for path in SOURCES if path.is_relative_to(REPO / folder)], PRONOUNS_PER_1000["code"])


def test_documents_have_few_pronouns() -> None:
    assert_few(DOCUMENTS, PRONOUNS_PER_1000["documents"])


def assert_few(paths: list[Path], per_1000: float) -> None:
    texts = {path: path.read_text() for path in paths}
    found = [(path, breach) for path, text in texts.items() for breach in pronouns(text)]
    lines = sum(text.count("\n") for text in texts.values())
    assert len(found) <= per_1000 * lines / 1000, f"{len(found)} in {lines} lines\n{report(found)}"


def test_first_lines_of_docstrings_can_be_read_alone() -> None:
    sources = [path for path in SOURCES if path.suffix in (".py", ".pyi")]
    found = [(path, breach) for path in sources for breach in docstring_breaches(path.read_text())]
    assert not found, report(found)


def test_comments_of_the_core_say_what_a_declaration_does() -> None:
    sources = [path for path in SOURCES if path.suffix in (".cc", ".h")]
    assert len(sources) > 100
    found = [(path, breach) for path in sources for breach in core_comment_breaches(path.read_text())]
    assert not found, report(found)


# ---- the checker


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("# it goes the short way", "fast path"),
        ("def goes_short(call): ...", "fast path"),
        ("a call at length", "slow path"),
        ("Whoever gets them owns them.", "the caller"),
        ("it comes home", "zero-copy return"),
        ("the time-out of a call", "timeout"),
        ("in place of the old", "instead of"),
        ("# in\n# place of the old", "instead of"),
        ("    /// made\n    /// anew", "again"),
        ("after some 3 s", "about 3 s"),
        ("The owner is told of it", "is notified of"),
        ("it lets go of the value", "release"),
        ("void Engine::buryAll()", "mark_closed"),
        ("class LocalDoor:", "listener"),
        ("#include <commons.h>", "multicast buffer"),
        ("takes the polling role", "leader"),
        ("engine.nudge()", "request_callback"),
        ("one look at the link, a glance", "poll"),
        ("the strangers at it", "unauthenticated connection"),
        ("beside the loop", "alongside"),
        ("the memory lies there", "resides"),
        ("It looks at the peer", "check"),
        ("the behaviour of threads", "American spelling"),
        ("serialised twice", "American spelling"),
    ],
)
def test_a_banned_word_is_found(text: str, instead: str) -> None:
    assert any(instead in str(breach) for breach in word_breaches(text, code=True))
    assert any(instead in str(breach) for breach in word_breaches(text, code=False))


def test_a_breach_has_line_word_and_replacement() -> None:
    (breach,) = word_breaches("first\nthe door opens\n", code=False)
    assert str(breach) == "2: 'door'; write: listener, accept"


@pytest.mark.parametrize("word", OLD_WORDS)
def test_an_old_word_is_found_in_any_spelling(word: str) -> None:
    camel = "".join(part.title() for part in word.split("_"))
    for text in (f"self._{word}_count = 1", f"class {camel}:", f"# {word.replace('_', ' ')}", f"void engine{camel}();"):
        assert word_breaches(text, code=True), text
        assert word_breaches(text, code=False), text


@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_old_name_is_found_in_code(name: str) -> None:
    for text in (f"x = {name}(1)", f'handlers.attr("{name}")', f"a.{name}", f"# see `{name}`"):
        assert word_breaches(text, code=True), text
    assert not any(name in str(breach) for breach in word_breaches(f"x{name}y", code=True))


def test_banned_names_count_in_code_only() -> None:
    assert word_breaches("self._footprint = Footprint()", code=True)
    assert not word_breaches("Footprint", code=False)


@pytest.mark.parametrize(
    "text",
    ["outdoors", "multicast buffer", "exercise", "indoor", "besides", "believes", "relies", "told", "some 3-tuples"],
)
def test_other_words_pass(text: str) -> None:
    assert not word_breaches(text, code=True)


def test_pronouns_are_counted_in_prose_and_names() -> None:
    found = pronouns("# Whoever asks,\ndef test_nobody_waits():\n  '''The peer whose call'''\nwholesale, them\n")
    assert [(breach.line, breach.found) for breach in found] == [(1, "Whoever"), (2, "nobody"), (3, "whose")]


def test_too_many_pronouns_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "REPO", tmp_path)
    file = tmp_path / "file.py"
    file.write_text("\n" * 999 + "# who\n")
    assert_few([file], 1.0)
    file.write_text("\n" * 998 + "# who\n# nobody\n")
    with pytest.raises(AssertionError, match=r"(?s)2 in 1000 lines.*file\.py:999: 'who'"):
        assert_few([file], 1.0)


@pytest.mark.parametrize("word", ["What", "Who", "Whoever", "It", "The same", "As", "One", "All", "Those"])
def test_bad_first_words_of_docstrings_are_found(word: str) -> None:
    for text in (f'"""{word} is."""', f'class C:\n    """{word} is."""', f'async def f():\n    """{word} is."""'):
        (breach,) = docstring_breaches(text)
        assert breach.found == word


def test_long_first_lines_of_docstrings_are_found() -> None:
    assert docstring_breaches(f'def f():\n    """{"x" * 81}"""')
    assert not docstring_breaches(f'def f():\n    """{"x" * 80}\n\n    {"y" * 90}\n    """')
    assert not docstring_breaches('"""Ask for all."""\ndef f():\n    """Itemize."""\n')


@pytest.mark.parametrize("word", ["The same", "As", "Hands", "Notes", "However", "Says", "Sees", "Tells", "Brings"])
def test_bad_first_words_of_the_core_are_found(word: str) -> None:
    for text in (f"int x;\n  /// {word} it.\nint f();\n", f'm.def("f", f, "a"_a,\n      "{word} "\n      "it.");'):
        (breach,) = core_comment_breaches(text)
        assert (breach.line, breach.found) == (2, word)


def test_later_lines_and_other_words_of_the_core_pass() -> None:
    assert not core_comment_breaches("/// Returns the size.\n/// One per call.\nint f();\n/// Itself.\nint g();\n")
    assert not core_comment_breaches('m.def("f", f, "Return it.\\n"\n      "All of it.");\nint x;  // As above.\n')
