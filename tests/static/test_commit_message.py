"""The hook that checks subjects of commits finds bad ones and is installed."""

import subprocess
import sys
from pathlib import Path

import pytest
from commit_message import fault

REPO = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "subject",
    [
        "shm: return lent chunks in batches",
        "tests: pass the deadline",
        "docs: discuss the focus of a pass",
        "all: rename classes and functions of Python to the field's words",
        "core: feed the queue, speed up nothing",
        'Revert "docs: draw the tree"',
        "fixup! docs: draw the tree",
        "x: " + "y" * 69,
    ],
)
def test_good_subjects_pass(subject: str) -> None:
    assert fault(subject + "\n\nBody. It may say anything.\n") is None


@pytest.mark.parametrize(
    ("subject", "reason"),
    [
        ("Chunks are returned", "area: imperative"),
        ("shm:return chunks", "area: imperative"),
        ("Shm: return chunks", "area: imperative"),
        ("shm: Return chunks", "area: imperative"),
        ("", "area: imperative"),
        ("shm: returns chunks", "no imperative"),
        ("shm: returned chunks", "no imperative"),
        ("shm: returning chunks", "no imperative"),
        ("shm: the chunks are returned", "no imperative"),
        ("shm: return chunks.", "period"),
        ("x: " + "y" * 70, "73 characters"),
    ],
)
def test_bad_subjects_are_found(subject: str, reason: str) -> None:
    assert reason in (fault(subject + "\n") or "")


def test_the_hook_rejects_a_bad_subject(tmp_path: Path) -> None:
    message = tmp_path / "COMMIT_EDITMSG"
    for subject, status in (("docs: draw the tree", 0), ("Drew the tree", 1)):
        message.write_text(subject)
        command = [sys.executable, REPO / "tools" / "commit_message.py", message]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status
        assert ("STYLE.md" in done.stderr) == bool(status)


def test_the_hook_is_configured() -> None:
    hooks = (REPO / ".pre-commit-config.yaml").read_text()
    assert "entry: .venv/bin/python tools/commit_message.py" in hooks
    assert "stages: [commit-msg]" in hooks
