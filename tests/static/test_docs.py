"""Code blocks, `make` targets and links of the documents are valid."""

import re
import subprocess
from pathlib import Path

import documents
import pytest

DOCUMENTS = documents.tracked()
IDS = [str(document.relative_to(documents.REPO)) for document in DOCUMENTS]
MAKEFILE = (documents.REPO / "Makefile").read_text()

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)


def faults(text: str) -> list[str]:
    """Return the errors in the code blocks of a document."""
    found = []
    for block in documents.split(text)[0]:
        if block.language in ("python", "py"):
            try:
                compile(block.text, "block", "exec", dont_inherit=True)
            except SyntaxError as error:
                found.append(f"line {block.line + (error.lineno or 1) - 1}: {error.msg}")
        elif block.language in ("sh", "bash"):
            shell = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
            if shell.returncode:
                found.append(f"line {block.line}: {shell.stderr.strip()}")
    return found


def test_the_readme_is_among_them() -> None:
    assert "README.md" in IDS


@every_document
def test_code_blocks_compile(document: Path) -> None:
    assert faults(document.read_text()) == []


@every_document
def test_make_targets_exist(document: Path) -> None:
    assert documents.make_goals(document.read_text()) <= documents.make_targets(MAKEFILE)


def test_the_site_has_every_page() -> None:
    site = (documents.REPO / "mkdocs.yml").read_text()
    pages = [path.relative_to(documents.REPO) for path in (documents.REPO / "docs").rglob("*.md")]
    assert [str(page) for page in pages if not re.search(rf"[-:] {re.escape(str(page))}$", site, re.MULTILINE)] == []


@every_document
def test_links_have_targets(document: Path) -> None:
    assert documents.dead_links(document) == []


def test_bad_blocks_are_found() -> None:
    assert faults("x\n\n```python\nimport telegrad\ndef f(:\n```\n")[0].startswith("line 5:")
    assert faults("```sh\nif true; then\n```\n")
    assert faults("```python\nprint(1)\n```\n~~~sh\nmake test\n~~~\n```text\nif (\n```\n") == []


def test_make_goals_are_read() -> None:
    text = "`make demo`, or `VENV=x make  test-slow docs`; make no.\n```sh\ncd x; make bench ARGS=-h  # make no\n```\n"
    assert documents.make_goals(text) == {"demo", "test-slow", "docs", "bench"}
    assert documents.make_targets("A ?= 1\nB := 2\nall: x ## y\nx z:\n\tmake w\n.PHONY: q\n") == {"all", "x", "z"}
    assert not documents.make_goals("`make no-such-target`") <= documents.make_targets(MAKEFILE)


def test_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `heading`, twice\n## A heading, twice\n")
    document = tmp_path / "document.md"
    document.write_text(
        "[a](other.md) [b](other.md#a-heading-twice-1) ![c](missing.png) [d](other.md#nowhere)\n"
        "[e](https://example.org/x) `[f](missing)` [g](#below) [h](#above)\n\n"
        '[r]: missing.md "title"\n```\n[i](missing)\n```\n# Below\n'
    )
    dead = [line.removeprefix(f"{document}:") for line in documents.dead_links(document)]
    assert dead == [
        "1: 'missing.png' does not exist",
        "1: 'other.md#nowhere' has no heading '#nowhere'",
        "2: '#above' has no heading '#above'",
        "4: 'missing.md' does not exist",
    ]
