"""Paths and names in the maps of the source tree exist, and no file is missing."""

import re
import subprocess
from collections.abc import Iterable, Iterator
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
DRAWN_AS_A_WHOLE = {
    "csrc/core/": "the table of the engine has its files",
    "csrc/tests/": "named after what they test",
    "csrc/fuzz/": "one fuzzer each",
    "src/telegrad/compat/": "torch's names",
}
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


def lines_of_tree(tree: str) -> Iterator[tuple[list[str], list[str], list[str]]]:
    """Yield the lines of a drawn tree: folders that begin, all around, names."""
    folders: dict[int, list[str]] = {}
    for line in tree.splitlines():
        begun: list[str] = []
        if drawn := FOLDERS.match(line):
            depth = len(drawn[1]) // 2
            around = folders.get(depth - 1, [""])
            folders = {level: names for level, names in folders.items() if level < depth}
            begun = folders[depth] = [around[0] + name for name in drawn[2].split()]
        yield begun, [folder for level in folders.values() for folder in level], IN_TREE.findall(line)


def missing_in_tree(tree: str) -> list[str]:
    """Return the files of a drawn tree that neither its folder nor a parent has."""
    missing = []
    for begun, inside, names in lines_of_tree(tree):
        missing += [name for name in begun if not matches(name)]
        missing += [name for name in names if not any(matches(folder + name) for folder in [*inside, ""])]
    return missing


def undrawn(tree: str, sources: Iterable[str]) -> list[str]:
    """Return the source files that a drawn tree leaves out.

    A header stands for its source file, and the reverse.
    """
    drawn = set()
    for _, inside, names in lines_of_tree(tree):
        for name in names:
            found = next((hits for folder in reversed(inside) if (hits := matches(folder + name))), ())
            drawn.update(str(Path(hit).with_suffix("")) for hit in found)
    return [name for name in sources if str(Path(name).with_suffix("")) not in drawn]


def sources() -> list[str]:
    """List the source files that the tree has to draw one by one."""
    roots, whole = ("src/telegrad/", "csrc/"), tuple(DRAWN_AS_A_WHOLE)
    found = [name for name in sorted(tracked()) if name.startswith(roots) and name.endswith((".py", ".h", ".cc"))]
    return [name for name in found if not name.startswith(whole) and not Path(name).name.startswith("__")]


def drawn_tree() -> str:
    blocks, _ = documents.split((documents.REPO / "ARCHITECTURE.md").read_text())
    (tree,) = [block.text for block in blocks if "src/telegrad/\n" in block.text]
    return tree


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
    assert missing_in_tree(drawn_tree()) == []


def test_the_drawn_tree_is_complete() -> None:
    assert len(sources()) > 250
    assert undrawn(drawn_tree(), sources()) == []


def test_the_engine_has_a_row_for_each_file() -> None:
    page = (documents.REPO / "ARCHITECTURE.md").read_text()
    files = [Path(name) for name in tracked() if name.startswith("csrc/core/")]
    assert len(files) > 60
    assert [file for file in files if not re.search(rf"\b{file.stem}\.(h|cc|\*)", page)] == []


def test_the_readers_of_metadata_are_in_its_table() -> None:
    page = (documents.REPO / "ARCHITECTURE.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| the decoded form |"))
    readers = [name for name in sources() if "messages.read_metadata(" in (documents.REPO / name).read_text()]
    assert len(readers) >= 4
    assert [name for name in readers if Path(name).name not in row] == []


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


def test_files_that_the_tree_leaves_out_are_found() -> None:
    tree = "csrc/\n  memory/   block.h, arena.*,\n            peer_arena.h\n  base/     crypto*.*\n"
    files = ["csrc/memory/arena.cc", "csrc/memory/peer_arena.cc", "csrc/memory/copy.cc", "csrc/base/crypto_none.cc"]
    assert undrawn(tree, files) == ["csrc/memory/copy.cc"]
