"""The hook and the check of subjects of commits find bad ones and are installed."""

import subprocess
import sys
from pathlib import Path

import pytest
from commit_message import BASE, bad_subjects, fault

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
        ("rpc: a test waits for the loop", "no imperative"),
        ("rpc: each chunk is returned", "no imperative"),
        ("rref, nn: return chunks", "area: imperative"),
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


def test_the_history_is_checked_from_a_commit_on(tmp_path: Path) -> None:
    def git(*command: str) -> str:
        names = ["-c", "user.name=w", "-c", "user.email=w@localhost", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", "-C", tmp_path, *names, *command], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(subject: str) -> str:
        git("commit", "-q", "--allow-empty", "--no-verify", "-m", subject)
        return git("rev-parse", "HEAD")

    assert bad_subjects(tmp_path) == []  # no repository
    git("init", "-q")
    commit("An older one")
    base = commit("docs: draw the tree")
    assert bad_subjects(tmp_path, base) == []
    commit("shm: return lent chunks in batches")
    commit("rref, nn: return chunks")
    commit("rpc: a test waits for the loop")
    first, second = bad_subjects(tmp_path, base)
    assert "'rpc: a test waits for the loop': 'a' is no imperative" in first
    assert "'rref, nn: return chunks': the subject must be" in second
    assert bad_subjects(tmp_path, BASE) == []  # unknown here, as in a shallow clone


def test_lint_checks_the_history() -> None:
    assert "\n\t$(PY) tools/commit_message.py --history\n" in (REPO / "Makefile").read_text()
