"""Numbers that Python and the core share have one source, telegrad.wire."""

import re
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.protocols.rref import RRefId
from telegrad.wire import MetadataField, ScopeField
from telegrad.worker.calls.encoded import CallMetadata
from telegrad.worker.calls.messages import Messages
from telegrad.worker.scope import Scope

ROOT = Path(__file__).parents[2]
CONSTANTS = ROOT / "csrc/wire/constants.h"


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
    decoded = {"tickets": "handles", "message": "wrap"}
    names = [field.name.lower() for field in MetadataField]
    assert [decoded.get(name, name) for name in names] == [name for name in CallMetadata._fields if name != "chain"]


@pytest.mark.parametrize("fields", [MetadataField, ScopeField], ids=lambda fields: fields.__name__)
def test_the_core_has_the_positions(fields: type[IntEnum]) -> None:
    struct = re.search(rf"struct {fields.__name__} {{\n(.*?)}};", CONSTANTS.read_text(), re.DOTALL)
    assert struct is not None
    found = {name: int(number) for name, number in re.findall(r"constexpr int k(\w+) = (\d+);", struct[1])}
    assert found.pop("Count", len(fields)) == len(fields)
    assert found == {field.name.title().replace("_", ""): int(field) for field in fields}


def test_python_writes_each_field_at_its_position() -> None:
    messages: Any = SimpleNamespace(_plain=tuple)
    written: Any = Messages._metadata(
        messages, (), RRefId(1, 2), "autocast", (SimpleNamespace(id="context"), "message"), "profile"
    )
    fields = {field.name.lower(): written[field] for field in MetadataField}
    assert fields.pop("tickets") == []
    assert fields.pop("target") == (1, 2)
    assert fields == {name: name for name in fields}


def test_the_core_writes_each_field_at_its_position() -> None:
    source = (ROOT / "csrc/python/metadata.cc").read_text()
    packed = re.search(r"PyTuple_Pack\(Field::kCount, (.*?)\)\);", source)
    assert packed is not None
    written = [argument.removesuffix(".ptr()") for argument in packed[1].split(", ")]
    named = {name: at for at, name in enumerate(written) if name not in ("nb::tuple()", "Py_None")}
    assert named == {name: MetadataField[name.upper()] for name in ("target", "context", "message")}
    assert written.index("nb::tuple()") == MetadataField.TICKETS


def test_the_description_has_the_version_of_the_core() -> None:
    core = re.search(r"kProtocolVersion = (\d+);", (ROOT / "csrc/core/message.h").read_text())
    described = re.search(r"^Version (\d+)\.", (ROOT / "docs/protocol.md").read_text(), re.MULTILINE)
    assert core is not None
    assert described is not None
    assert core[1] == described[1]
