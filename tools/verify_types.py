"""Check that all symbols of a package have known types: verify_types.py [PACKAGE].

``pyright --verifytypes`` finds them; this prints those that lack one, and exits with 1 unless the score is 100 %.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def incomplete(package: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """List the symbols without a fully known type, each with the missing part.

    Args:
        package: an importable package with a ``py.typed``.
        environment: of the interpreter that finds the package.

    Raises:
        RuntimeError: pyright could not read the package.
    """
    # Pyright asks the `python` on PATH for the location of packages.
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    said = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--verifytypes", package, "--ignoreexternal", "--outputjson"],
        env={**environment, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        report = json.loads(said.stdout)
        found: dict[str, Any] = report["typeCompleteness"]
        symbols = found["symbols"]
    except (ValueError, KeyError) as e:
        raise RuntimeError(f"pyright reported nothing about {package}:\n{said.stdout}{said.stderr}") from e
    if not any(symbol["isExported"] for symbol in symbols):
        errors = [diagnostic["message"] for diagnostic in report["generalDiagnostics"]]
        raise RuntimeError(f"pyright found no symbols in {package}: {'; '.join(errors)}")
    return [
        f"{symbol['name']}: {_why(symbol)}"
        for symbol in symbols
        if symbol["isTypeAmbiguous"] or not symbol["isTypeKnown"]
    ]


def _why(symbol: dict[str, Any]) -> str:
    for diagnostic in symbol["diagnostics"]:
        if diagnostic["severity"] == "error":
            line = diagnostic["range"]["start"]["line"] + 1 if "range" in diagnostic else 1
            message = " ".join(diagnostic["message"].split())
            return f"{diagnostic['file']}:{line}: {message}"
    return "something in it has no known type"


def main() -> int:
    package = sys.argv[1] if len(sys.argv) > 1 else "telegrad"
    lacking = incomplete(package)
    if lacking:
        print("\n".join(lacking))
        print(f"{len(lacking)} symbols of {package} have no known type; annotate them (`self.x: int = ...`).")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
