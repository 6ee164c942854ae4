"""Write src/telegrad/_core.pyi from the compiled core, or --check it."""

import argparse
import difflib
import importlib
import re
import sys
from pathlib import Path

from nanobind.stubgen import StubGen

STUB = Path(__file__).parent.parent / "src" / "telegrad" / "_core.pyi"

PARAMETERS = {"list": "Any", "set": "Any", "dict": "Any, Any", "tuple": "Any, ..."}
"""Type parameters of containers that nanobind omits and type checkers require."""

BARE = re.compile(r"(?<=: |> )(list|set|dict|tuple)\b(?!\[)")


def generate() -> str:
    stub = StubGen(importlib.import_module("telegrad._core"), quiet=True)
    stub.put(stub.module)
    return BARE.sub(lambda found: f"{found[1]}[{PARAMETERS[found[1]]}]", stub.get())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the stub is out of date")
    wanted = generate()
    if not parser.parse_args().check:
        STUB.write_text(wanted)
        return 0
    found = STUB.read_text() if STUB.exists() else ""
    if found == wanted:
        return 0
    diff = difflib.unified_diff(found.splitlines(), wanted.splitlines(), "_core.pyi", "the compiled core", lineterm="")
    print("\n".join(diff))
    print("src/telegrad/_core.pyi does not describe the compiled core; run `make stubs`.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
