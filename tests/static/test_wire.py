"""Numbers that Python and the core share have one source, telegrad.wire."""

import re
import subprocess
import sys
from pathlib import Path

from telegrad.wire import MetadataField, ScopeField
from telegrad.worker.calls.encoded import CallMetadata
from telegrad.worker.scope import Scope

ROOT = Path(__file__).parents[2]


def run(root: Path, *args: str) -> int:
    return subprocess.run([sys.executable, str(root / "tools/wire_header.py"), *args], check=False).returncode


def test_the_header_of_the_core_is_current() -> None:
    assert run(ROOT, "--check") == 0


def test_a_changed_number_makes_the_header_stale(tmp_path: Path) -> None:
    for folder in ("tools", "src/telegrad/wire", "csrc/wire"):
        (tmp_path / folder).mkdir(parents=True)
        for file in (ROOT / folder).glob("*.*"):
            (tmp_path / folder / file.name).write_text(file.read_text())
    tags = tmp_path / "src/telegrad/wire/tags.py"
    tags.write_text(tags.read_text().replace("GRADIENTS = 7", "GRADIENTS = 8"))
    assert run(tmp_path, "--check") == 1
    assert run(tmp_path) == 0
    assert run(tmp_path, "--check") == 0
    assert "kGradients = 8" in (tmp_path / "csrc/wire/constants.h").read_text()


def test_positions_name_the_fields() -> None:
    assert [field.name.lower() for field in ScopeField] == list(Scope._fields)
    # Tickets become handles, a message what records its tensors, and a context may come with a call chain.
    assert len(MetadataField) == len(CallMetadata._fields) - 1


def test_the_description_has_the_version_of_the_core() -> None:
    core = re.search(r"kProtocolVersion = (\d+);", (ROOT / "csrc/core/message.h").read_text())
    described = re.search(r"^Version (\d+)\.", (ROOT / "docs/protocol.md").read_text(), re.MULTILINE)
    assert core is not None
    assert described is not None
    assert core[1] == described[1]
