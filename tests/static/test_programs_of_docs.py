"""The Python programs of the introductory pages run unchanged."""

import subprocess
import sys
from pathlib import Path

import documents
import pytest
from free_ports import free_port

PAGES = [documents.REPO / "README.md", *sorted((documents.REPO / "docs" / "start").glob("*.md"))]
PROGRAMS = [
    pytest.param(block.text, id=f"{page.name}:{block.line}")
    for page in PAGES
    for block in documents.split(page.read_text())[0]
    if block.language == "python"
]


@pytest.mark.parametrize("text", PROGRAMS)
def test_the_program_runs(text: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(text.replace('MASTER_PORT="29500"', f'MASTER_PORT="{free_port()}"'))
    run = subprocess.run(
        [sys.executable, program.name], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 5
