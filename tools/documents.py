"""Parser of the project's Markdown: code blocks, links, `make` targets."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

REPO = Path(__file__).resolve().parent.parent

FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>```+|~~~+)\s*(?P<language>[\w+-]*)")
LINK = re.compile(
    r"(?<!\\)!?\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<target>[^()\s]*(?:\([^()\s]*\)[^()\s]*)*)(?:\s+\"[^\"]*\")?\)"
)
REFERENCE = re.compile(r"^\s{0,3}\[[^\]]+\]:\s*(?P<target>\S+)")
HEADING = re.compile(r"^#{1,6}\s+(?P<title>.+?)\s*#*$")
CODE_SPAN = re.compile(r"(`+)(.+?)\1")
MAKE = re.compile(r"(?:^|[\s`;&(])make((?:\s+(?!-)[a-z][\w-]*(?![\w=]))+)")
ELSEWHERE = re.compile(r"^(https?|mailto):")


@dataclass(frozen=True)
class Block:
    """A fenced code block; `line` is the first line of its text."""

    line: int
    language: str
    text: str


def tracked() -> list[Path]:
    """Return every Markdown file that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout
    return sorted({REPO / name for name in listed.split("\0") if name and (REPO / name).exists()})


def split(text: str) -> tuple[list[Block], list[tuple[int, str]]]:
    """Return the code blocks of a document, and its other lines with their numbers."""
    blocks, prose = [], []
    opened: tuple[int, str, str, list[str]] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None:
            if fence:
                opened = (number + 1, fence["language"].lower(), fence["fence"], [])
            else:
                prose.append((number, line))
        elif fence and fence["fence"].startswith(opened[2]) and not fence["language"]:
            blocks.append(Block(opened[0], opened[1], "\n".join(opened[3]) + "\n"))
            opened = None
        else:
            opened[3].append(line)
    if opened is not None:
        raise ValueError(f"line {opened[0] - 1}: a code block is never closed")
    return blocks, prose


def links(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, target) of every link and image."""
    for number, line in split(text)[1]:
        bare = CODE_SPAN.sub("", line)
        for match in LINK.finditer(bare):
            yield number, match["target"].strip("<>")
        if match := REFERENCE.match(bare):
            yield number, match["target"].strip("<>")


def anchors(text: str) -> set[str]:
    """Return the fragments of the headings, in the format of code hosts.

    They are lower case, with hyphens for spaces, and -1, -2 for repeated headings.
    """
    found: set[str] = set()
    for _, line in split(text)[1]:
        if not (heading := HEADING.match(line)):
            continue
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading["title"]).replace("`", "")
        slug = base = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        count = 0
        while slug in found:
            count += 1
            slug = f"{base}-{count}"
        found.add(slug)
    return found


def dead_links(document: Path) -> list[str]:
    """Return a line for every relative link without target.

    External links are skipped.
    """
    dead = []
    for line, target in links(document.read_text()):
        if ELSEWHERE.match(target):
            continue
        path, _, fragment = unquote(target).partition("#")
        goal = (document.parent / path).resolve() if path else document
        if not path and not fragment:
            why = "is empty"
        elif not goal.is_relative_to(REPO) and document.is_relative_to(REPO):
            why = "leaves the repository"
        elif not goal.exists():
            why = "does not exist"
        elif fragment and goal.suffix == ".md" and fragment not in anchors(goal.read_text()):
            why = f"has no heading '#{fragment}'"
        else:
            continue
        dead.append(f"{document}:{line}: {target!r} {why}")
    return dead


def reference_names(text: str) -> list[str]:
    """Return the names that a page of the reference shows, as a reader sees them."""
    shown = re.findall(r"^::: (\S+)$(?:\n    options:(?:\n      (?:heading: (\S+)|.*))*)?", text, re.MULTILINE)
    return [heading or name for name, heading in shown]


def make_goals(text: str) -> set[str]:
    """Return the `make` targets in code spans and code blocks of a document."""
    blocks, prose = split(text)
    code = [block.text for block in blocks if block.language in ("", "sh", "bash", "console", "shell")]
    code += [match[2] for _, line in prose for match in CODE_SPAN.finditer(line)]
    lines = [line.partition("#")[0] for text in code for line in text.splitlines()]
    return {goal for line in lines for match in MAKE.finditer(line) for goal in match[1].split()}


def make_targets(makefile: str) -> set[str]:
    return {name for line in re.findall(r"^([\w -]+):(?!=)", makefile, re.MULTILINE) for name in line.split()}
