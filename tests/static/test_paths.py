"""Paths, and the names next to them, in the maps of the source tree exist."""

import re
import subprocess
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import documents
import pytest

MAPS = ("ARCHITECTURE.md", "GLOSSARY.md", "CONTRIBUTING.md", "SECURITY.md")
ROOTS = ("", "src/telegrad/")
PATH = re.compile(r"[\w.*-]+(/[\w.*-]+)*/?")
FILE = re.compile(r".+\.(py|pyi|cc|h|md|toml|txt|yml|json|sh|svg|\*)")
NAME = re.compile(r"[A-Za-z_]\w*((\.|::)\w+)*")
IN_TREE = re.compile(r"(?<![\w/])[\w*]+(?:\.(?:py|cc|h|\*)(?![\w.])|/(?=[, ]|$))")
FOLDERS = re.compile(r"( *)([\w/]+/(?: [\w/]+/)*)(?= |$)")


@cache
def tracked() -> frozenset[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=documents.REPO, check=True, capture_output=True, text=True).stdout
    files = {name for name in listed.split("\0") if name and (documents.REPO / name).exists()}
    return frozenset(files | {str(parent) for name in files for parent in Path(name).parents})


@cache
def matches(path: str, folder: str = "") -> tuple[str, ...]:
    """Return the files and folders of a path, which may have stars."""
    roots = (*ROOTS, folder) if folder else ROOTS
    wanted = [root + path.rstrip("/") for root in roots]
    return tuple(name for name in sorted(tracked()) if any(fnmatch(name, each) for each in wanted))


def is_path(span: str) -> bool:
    return bool(PATH.fullmatch(span)) and ("/" in span or bool(FILE.fullmatch(span)) or span == "Makefile")


def missing_paths(text: str, folder: str = "") -> list[str]:
    """Return the paths in code spans without a file.

    Args:
        text: one line of a document.
        folder: where bare names of files are, until the line has a path.
    """
    missing = []
    for match in documents.CODE_SPAN.finditer(text):
        span = match[2]
        if not is_path(span):
            continue
        found = matches(span, "" if "/" in span else folder)
        if not found:
            missing.append(span)
        elif "/" in span:
            folder = f"{Path(found[0]).parent}/"
    return missing


def missing_names(row: str) -> list[str]:
    """Return the names in code spans of a table row that no file of the row has."""
    place = row.split("|")[2]
    spans = [match[2] for match in documents.CODE_SPAN.finditer(place)]
    folder, files = "", []
    for span in filter(is_path, spans):
        found = matches(span, "" if "/" in span else folder)
        folder = f"{Path(found[0]).parent}/" if found and "/" in span else folder
        files += [documents.REPO / name for name in found if (documents.REPO / name).is_file()]
    texts = [file.read_text() for file in files]
    names = [span for span in spans if not is_path(span) and NAME.fullmatch(span) and not span.startswith("make")]
    return [n for n in names if texts and not any(re.search(rf"\b{re.split(r'[.:]+', n)[-1]}\b", t) for t in texts)]


def missing_in_tree(tree: str) -> list[str]:
    """Return the files of a drawn tree that neither its folder nor a parent has."""
    missing = []
    folders: dict[int, list[str]] = {}
    for line in tree.splitlines():
        if drawn := FOLDERS.match(line):
            depth = len(drawn[1]) // 2
            around = folders.get(depth - 1, [""])
            folders = {level: names for level, names in folders.items() if level < depth}
            folders[depth] = [around[0] + name for name in drawn[2].split()]
            missing += [name for name in folders[depth] if not matches(name)]
        inside = [folder for level in folders.values() for folder in level]
        missing += [
            name for name in IN_TREE.findall(line) if not any(matches(folder + name) for folder in [*inside, ""])
        ]
    return missing


@pytest.mark.parametrize("document", MAPS)
def test_paths_exist(document: str) -> None:
    lines = (documents.REPO / document).read_text().splitlines()
    missing = [(number, path) for number, line in enumerate(lines, 1) for path in missing_paths(line)]
    assert missing == []


def test_the_names_of_the_places_exist() -> None:
    text = (documents.REPO / "ARCHITECTURE.md").read_text().partition("## Where do I change X")[2]
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) > 40
    assert [(row, names) for row in rows if (names := missing_names(row))] == []


def test_the_drawn_tree_exists() -> None:
    blocks, _ = documents.split((documents.REPO / "ARCHITECTURE.md").read_text())
    (tree,) = [block.text for block in blocks if "src/telegrad/\n" in block.text]
    assert missing_in_tree(tree) == []


def test_missing_paths_and_names_are_found() -> None:
    assert missing_paths("`csrc/core/engine.h`, `engine_calls.cc`, `engine_sent.cc`, `nowhere/x.py`, `wire/`") == [
        "engine_sent.cc",
        "nowhere/x.py",
    ]
    assert missing_names("| a | `wire/tags.py` `Tag`, `Tag.CALL`, `Tug` |") == ["Tug"]
    assert missing_in_tree(
        "csrc/   the core\n  core/   engine*.cc, moon.h, base/, sun/\n  base/   engine.cc\n  moon/   x\n"
    ) == [
        "moon.h",
        "sun/",
        "engine.cc",
        "csrc/moon/",
        "moon/",
    ]
