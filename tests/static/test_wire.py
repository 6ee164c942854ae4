"""Numbers that Python and the core share have one source, telegrad.wire."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from enum import IntEnum, IntFlag
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad import errors
from telegrad.protocols.rref import RRefId
from telegrad.serialize.function_names import _Known
from telegrad.wire import (
    ANY_EPOCH,
    MAX_METADATA,
    BodyKind,
    CallFormField,
    CallStateText,
    CancelItemField,
    CompletionField,
    CompletionItemField,
    EventItemField,
    Flag,
    KnownNameField,
    MessageItemField,
    MetadataField,
    RequestStateText,
    ScopeField,
    Status,
    Tag,
    ints,
)
from telegrad.worker.calls.encoded import CallMetadata
from telegrad.worker.calls.interception import CallForm
from telegrad.worker.calls.messages import Messages
from telegrad.worker.scope import Scope
from telegrad.worker.serving.request_info import RequestInfo

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


def names_of(table: type[IntEnum]) -> list[str]:
    return [field.name.lower() for field in table]


def test_positions_name_the_fields() -> None:
    assert names_of(ScopeField) == list(Scope._fields)
    assert names_of(CallFormField) == list(CallForm._fields)
    assert names_of(KnownNameField) == list(_Known._fields)
    # Tickets become handles, a message what records its tensors, and a context may come with a call chain.
    decoded = {"tickets": "handles", "message": "wrap"}
    names = [field.name.lower() for field in MetadataField]
    assert [decoded.get(name, name) for name in names] == [name for name in CallMetadata._fields if name != "chain"]


ITEMS = (MessageItemField, CompletionItemField, EventItemField, CancelItemField)
TABLES = (MetadataField, ScopeField, CompletionField, *ITEMS, CallFormField, KnownNameField)


@pytest.mark.parametrize("fields", TABLES, ids=lambda fields: fields.__name__)
def test_the_core_has_the_positions(fields: type[IntEnum]) -> None:
    struct = re.search(rf"struct {fields.__name__} {{\n(.*?)}};", CONSTANTS.read_text(), re.DOTALL)
    assert struct is not None
    found = {name: int(number) for name, number in re.findall(r"constexpr int k(\w+) = (\d+);", struct[1])}
    assert found.pop("Count", len(fields)) == len(fields)
    assert found == {field.name.title().replace("_", ""): int(field) for field in fields}


def test_python_writes_each_field_at_its_position() -> None:
    messages: Any = SimpleNamespace(_plain=tuple)
    written: Any = Messages._metadata(
        messages, (), RRefId(1, 2), "autocast", (SimpleNamespace(id="context"), "message"), "profile", "headers"
    )
    fields = {field.name.lower(): written[field] for field in MetadataField}
    assert fields.pop("tickets") == []
    assert fields.pop("target") == (1, 2)
    assert fields == {name: name for name in fields}


def test_the_core_writes_each_field_at_its_position() -> None:
    source = (ROOT / "csrc/python/metadata.cc").read_text()
    packed = re.search(r"PyTuple_Pack\(Field::kCount, (.*?)\)\);", source, re.DOTALL)
    assert packed is not None
    written = [argument.removesuffix(".ptr()") for argument in re.split(r",\s+", packed[1])]
    named = {name: at for at, name in enumerate(written) if name not in ("nb::tuple()", "Py_None")}
    assert named == {name: MetadataField[name.upper()] for name in ("target", "context", "message")}
    assert written.index("nb::tuple()") == MetadataField.TICKETS


def test_all_work_items_begin_alike() -> None:
    for table in ITEMS:
        assert names_of(table)[:2] == ["kind", "needs_thread"]


@pytest.mark.parametrize(
    ("file", "tables"),
    [("messages.cc", (CompletionField, *ITEMS)), ("prepare.cc", (CallFormField,))],
    ids=["messages", "calls"],
)
def test_the_core_sets_each_field_once(file: str, tables: tuple[type[IntEnum], ...]) -> None:
    source = (ROOT / "csrc/python" / file).read_text()
    for table in tables:
        _, _, function = source.partition(f"using Field = telegrad::wire::{table.__name__};")
        if not function:
            _, _, function = source.partition(f"using Field = wire::{table.__name__};")
        function, _, _ = function.partition("\n}\n")
        found = re.findall(r"fields\.set\(Field::k(\w+),", function)
        begun = ["Kind", "NeedsThread"] if "item_fields<Field>" in function else []
        assert [*begun, *found] == [field.name.title().replace("_", "") for field in table]


UNPACKED: dict[str, dict[str, type[IntEnum]]] = {
    "worker/calls/client.py": {"completion": CompletionField},
    "worker/serving/dispatch.py": {
        "on_message": MessageItemField,
        "on_completion": CompletionField,
        "on_event": EventItemField,
    },
    "worker/serving/handlers.py": {"cancel": CancelItemField},
    "autograd/passes/manager.py": {"completion": CompletionField},
    "rref/creation.py": {"completion": CompletionField},
}
"""Tables of the tuples that a module unpacks, by the name of the tuple or of the function."""


def unpackings(module: ast.Module) -> Iterator[tuple[str, str, list[str]]]:
    """Yield function, source and names of each statement that unpacks a tuple."""
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef):
            continue
        for statement in ast.walk(function):
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple):
                names = [ast.unparse(target) for target in statement.targets[0].elts]
                yield function.name, ast.unparse(statement.value), names


def at_positions(names: list[str], length: int) -> list[str]:
    """Return the name for each position, with `_` for those of a starred name."""
    for at, name in enumerate(names):
        if name.startswith("*"):
            return [*names[:at], *["_"] * (length - len(names) + 1), *names[at + 1 :]]
    return names


@pytest.mark.parametrize("file", UNPACKED)
def test_python_unpacks_the_fields_in_their_order(file: str) -> None:
    module = ast.parse((ROOT / "src/telegrad" / file).read_text())
    found = set()
    for function, value, names in unpackings(module):
        key = next((each for each in (value, function) if each in UNPACKED[file]), None)
        if key is None or (key == function and not value.startswith("item")):
            continue
        found.add(key)
        fields = names_of(UNPACKED[file][key])
        unpacked = at_positions(names, len(fields))
        assert len(unpacked) == len(fields), (function, names)
        assert [(name, field) for name, field in zip(unpacked, fields, strict=True) if name not in ("_", field)] == []
    assert found == set(UNPACKED[file])


def test_the_completion_is_at_its_position_in_an_item() -> None:
    source = (ROOT / "src/telegrad/worker/serving/dispatch.py").read_text()
    assert f"= item[{CompletionItemField.COMPLETION:d}]\n" in source


def test_requests_have_the_facts_that_the_core_gives_them() -> None:
    source = (ROOT / "csrc/python/request.cc").read_text()
    call = re.search(r"python_\.info_type\((.*)\);", source)
    assert call is not None
    given = [re.findall(r"[a-z_]+", argument)[-1] for argument in call[1].split(", ")]
    assert given == list(RequestInfo._fields[: len(given)])


def test_constants_of_the_core_come_from_the_table() -> None:
    constants = CONSTANTS.read_text()
    assert f"kAnyEpoch = {ANY_EPOCH};" in constants
    assert f"kMaxMetadata = {MAX_METADATA};" in constants
    assert "kAnyEpoch = wire::kAnyEpoch;" in (ROOT / "csrc/core/message.h").read_text()
    assert "trailer = wire::kMaxMetadata;" in (ROOT / "csrc/core/limits.h").read_text()


@pytest.mark.parametrize(
    ("table", "header", "enum", "source", "named"),
    [
        (CallStateText, "message.h", "CallState", "csrc/core/message.h", r"switch \(state\) {(.*?)\n  }\n"),
        (RequestStateText, "snapshot.h", "State", "csrc/python/snapshot.cc", r"kNames\[\] = {(.*?)};"),
    ],
    ids=["calls", "requests"],
)
def test_states_have_their_texts(table: Any, header: str, enum: str, source: str, named: str) -> None:
    declared = re.search(
        rf"enum class {enum} : std::uint8_t {{(.*?)}};", (ROOT / "csrc/core" / header).read_text(), re.S
    )
    assert declared is not None
    states = re.findall(r"\bk(\w+)", re.sub("//.*", "", declared[1]))
    listed = re.search(named, (ROOT / source).read_text(), re.S)
    assert listed is not None
    texts = re.findall(r"Text::k(\w+)", listed[1])
    renamed = {"Replied": "ReplyLost"}  # of a call that has timed out
    assert texts == [renamed.get(state, state) for state in states]
    assert texts == [text.name.title().replace("_", "") for text in table]


def test_remedies_are_of_states_that_the_core_reports() -> None:
    assert set(errors._REMEDY_BY_STATE) <= set(CallStateText)


def test_the_description_has_the_version_of_the_core() -> None:
    core = re.search(r"kProtocolVersion = (\d+);", (ROOT / "csrc/core/message.h").read_text())
    described = re.search(r"^Version (\d+)\.", (ROOT / "docs/protocol.md").read_text(), re.MULTILINE)
    assert core is not None
    assert described is not None
    assert core[1] == described[1]


def test_plain_ints_are_made_once() -> None:
    tables: dict[str, type[IntEnum | IntFlag]] = {"TAG": Tag, "FLAG": Flag, "BODY": BodyKind, "STATUS": Status}
    for name in ints.__all__:
        table, _, member = name.partition("_")
        assert type(getattr(ints, name)) is int
        if table in tables:
            assert getattr(ints, name) == tables[table][member]
    made = re.compile(r"\bint\((Tag|Flag|BodyKind|Status)\.")
    sources = (path for path in (ROOT / "src").rglob("*.py") if path.name != "ints.py")
    assert [str(path) for path in sources if made.search(path.read_text())] == []
