"""Rename modules and identifiers of the Python tree, once.

Moves files with `git mv`, rewrites dotted names and paths everywhere, then replaces whole identifiers. A table that
begins with a path applies to the files below it only.
"""

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUFFIXES = (".py", ".pyi", ".md", ".toml", ".yml", ".sh", ".cc", ".h", ".txt", "Makefile", "CMakeLists.txt")


def files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kept = [
        ROOT / name for name in listed if name.endswith(SUFFIXES) and name not in ("CHANGELOG.md", "tools/rename.py")
    ]
    return [file for file in kept if file.exists()]


def read_table(path: str) -> list[tuple[str, str]]:
    rows = []
    for line in Path(path).read_text().splitlines():
        line = line.split("#")[0].strip()
        if line:
            old, new = line.split()
            rows.append((old, new))
    return rows


def move(table: str) -> None:
    rows = read_table(table)
    for old, new in rows:
        target = ROOT / "src/telegrad" / new
        for folder in (target.parent, *target.parent.parents):
            if folder == ROOT / "src/telegrad":
                break
            folder.mkdir(exist_ok=True)
            if not (folder / "__init__.py").exists():
                (folder / "__init__.py").write_text("")
                subprocess.run(["git", "add", "-N", folder / "__init__.py"], cwd=ROOT, check=True)
        subprocess.run(["git", "mv", ROOT / "src/telegrad" / old, target], check=True)
    dotted = {old.removesuffix(".py").replace("/", "."): new.removesuffix(".py").replace("/", ".") for old, new in rows}
    slashed = dict(rows)
    by_package: dict[str, dict[str, str]] = {}
    for old, new in dotted.items():
        package, _, name = old.rpartition(".")
        by_package.setdefault(package, {})[name] = new
    names = re.compile(r"\btelegrad\.(" + "|".join(map(re.escape, sorted(dotted, key=len, reverse=True))) + r")\b(?!/)")
    paths = re.compile(r"(?<![\w/])(src/telegrad/|telegrad/)?(" + "|".join(map(re.escape, slashed)) + r")\b")
    for file in files():
        text = file.read_text()
        new = names.sub(lambda m: "telegrad." + dotted[m[1]], text)
        new = paths.sub(lambda m: (m[1] or "") + slashed[m[2]], new)

        def from_package(m: re.Match[str]) -> str:
            indent, package, rest = m[1], m[2], m[3]
            moved = by_package.get(package.removeprefix("telegrad").removeprefix("."), {})
            stay, lines = [], []
            for item in rest.split(","):
                name, _, alias = item.strip().partition(" as ")
                if name not in moved:
                    stay.append(item.strip())
                    continue
                to_package, _, to_name = moved[name].rpartition(".")
                alias = alias or (name if to_name != name else "")
                where = "telegrad" + ("." + to_package if to_package else "")
                lines.append(f"{indent}from {where} import {to_name}" + (f" as {alias}" if alias else ""))
            if stay:
                lines.insert(0, f"{indent}from {package} import {', '.join(stay)}")
            return "\n".join(lines)

        if file.suffix == ".py":
            new = re.sub(r"(?m)^( *)from (telegrad[.\w]*) import ([\w, ]+)$", from_package, new)
        if new != text:
            file.write_text(new)


def rename(table: str) -> None:
    scope, rows = "", {}
    sections: list[tuple[str, dict[str, str]]] = []
    for line in Path(table).read_text().splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("["):
            scope = line.strip("[]")
            rows = {}
            sections.append((scope, rows))
        elif line:
            old, new = line.split()
            rows[old] = new
    for scope, rows in sections:
        places = [ROOT / place for place in scope.split()]
        for file in files():
            if any(file == place or place in file.parents for place in places):
                text = file.read_text()
                new = replaced(file, text, rows)
                if new != text:
                    file.write_text(new)


def replaced(file: Path, text: str, rows: dict[str, str]) -> str:
    """Replace identifiers.

    English words are replaced where they are names, not in comments and prose.
    """
    words = {old: new for old, new in rows.items() if old.isalpha() and old in (old.lower(), old.capitalize())}
    others = {old: new for old, new in rows.items() if old not in words}
    if others:
        longest_first = sorted(others, key=len, reverse=True)
        pattern = re.compile(r"(?<![\w$])(" + "|".join(map(re.escape, longest_first)) + r")(?!\w)")
        text = pattern.sub(lambda m: others[m[1]], text)
    if not words:
        return text
    if file.suffix != ".py":
        return re.sub(r"`(\w+)(?=[`(.])", lambda m: "`" + words.get(m[1], m[1]), text)
    lines = text.splitlines(keepends=True)
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string in words:
            found.append((token.start, token.string, words[token.string]))
        elif token.type == tokenize.STRING and token.string[1:-1] in words:
            (row, column), word = token.start, token.string[1:-1]
            found.append(((row, column + 1), word, words[word]))
    for (row, column), old, new in reversed(found):
        line = lines[row - 1]
        lines[row - 1] = line[:column] + new + line[column + len(old) :]
    return re.sub(r"`(\w+)(?=[`(.])", lambda m: "`" + words.get(m[1], m[1]), "".join(lines))


if __name__ == "__main__":
    {"move": move, "rename": rename}[sys.argv[1]](sys.argv[2])
