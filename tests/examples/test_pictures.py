"""Each example has a picture in docs/examples.md, drawn from what a run reports."""

import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import draw_examples
import pytest
from example_helpers import import_module

SVG = "{http://www.w3.org/2000/svg}"
PAGE = (draw_examples.ROOT / "docs" / "examples.md").read_text()
LARGEST = 60_000  # bytes: a page with all pictures loads quickly

each_example = pytest.mark.parametrize("name", sorted(draw_examples.programs()))


def view_of(name: str) -> ModuleType:
    """Import a module of an example, which has no package."""
    path = draw_examples.ROOT / "examples" / name
    return import_module(f"view_of_{path.parent.name}", path)


def texts(svg: Path) -> set[str]:
    return {each.text for each in ET.parse(svg).iter(f"{SVG}text") if each.text}


@each_example
def test_a_section_shows_the_picture(name: str) -> None:
    sections = [text for text in re.split(r"^## ", PAGE, flags=re.MULTILINE) if f"(pictures/{name}.svg)" in text]
    assert len(sections) == 1
    shown = re.search(rf"\[!\[([^\]]+)\]\(pictures/{name}\.svg\)\]\(pictures/{name}\.svg\)", sections[0])
    assert shown is not None
    assert len(shown[1]) > 30, "the text says what the picture shows"


@each_example
def test_a_picture_is_small_and_readable_in_both_themes(name: str) -> None:
    path = draw_examples.PICTURES / f"{name}.svg"
    assert path.stat().st_size < LARGEST
    background = ET.parse(path).find(f".//{SVG}path[@style]")
    assert background is not None
    assert background.get("style") == "fill: #ffffff"  # the text is black
    assert texts(path)


def test_a_recorded_result_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    view = view_of("common/view.py")

    def draw(folder: Path) -> Path:
        figure, (first, second) = view.new_figure("A run", panels=2)
        view.curves(first, {"trainer 1": [0.5, 0.9]}, "epoch", "accuracy", expected=[0.5, 0.8], goal=0.8)
        view.timeline(second, "a step", [("stage 0", [("F0", 1.0, 1.1), ("B0", 1.2, 1.4)])])
        return view.save(figure, folder, "run").with_suffix(".svg")

    made, again = draw(tmp_path / "made"), draw(tmp_path / "again")
    assert {"A run", "trainer 1", "in one process", "goal: 0.8", "epoch", "stage 0", "F0", "B0"} <= texts(made)
    assert made.read_bytes() == again.read_bytes()


def test_the_rewards_of_cartpole_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    shown = view_of("reinforcement_learning/view.py").View("CartPole", 475.0, 10)
    shown.rewards, shown.running_rewards = [10.0, 20.0], [0.5, 1.5]
    assert {"CartPole", "running reward", "solved: 475"} <= texts(shown.draw_curve(tmp_path).with_suffix(".svg"))


@pytest.fixture
def one_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the examples by a program whose status is its last option."""
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, sys\n"
        "out, status = sys.argv[sys.argv.index('--out') + 1], sys.argv[-1]\n"
        "pathlib.Path(out, 'program.svg').write_text('new')\n"
        "sys.exit(int(status))\n"
    )
    monkeypatch.setattr(draw_examples, "programs", lambda: {"program": program})
    return tmp_path / "program.svg"


@pytest.mark.parametrize(("status", "content"), [("0", "new"), ("1", "old")])
def test_only_a_run_that_reaches_its_goal_is_drawn(one_program: Path, status: str, content: str) -> None:
    one_program.write_text("old")
    assert draw_examples.draw("program", status, folder=one_program.parent) == (status == "0")
    assert one_program.read_text() == content


def test_an_unknown_example_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        draw_examples.main(["no-such-example"])
    assert "there is no example no-such-example" in capsys.readouterr().err
