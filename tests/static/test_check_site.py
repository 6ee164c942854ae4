"""The check of the documentation site finds each kind of fault.

It needs Chromium.
"""

from collections.abc import Iterator
from pathlib import Path

import browser
import check_site
import pytest

CHROMIUM = browser.find_chromium()

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

WIDTH = check_site.WIDTHS[-1]
LONG = "a_word_without_a_place_to_break_" * 4
PYTHON = '<div class="language-python highlight"><pre><code>{}</code></pre></div>'

HEAD = '<!doctype html><meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
GOOD = {
    "words": "<p>a short line</p>",
    "a table that scrolls": f'<div style="overflow-x: auto"><table><tr><td>{LONG}</td></tr></table></div>',
    "highlighted code": PYTHON.format('<span class="k" style="color: red">import</span> torch'),
    "plain text": '<div class="language-text highlight"><pre><code>output</code></pre></div>',
    "a command": '<div class="language-sh highlight"><pre><code>pip install telegrad</code></pre></div>',
}
BAD = {
    "the page is 900 pixels wide": '<div style="width: 900px">wide</div>',
    "hides ": f'<p style="overflow: hidden">{LONG}</p>',
    "from -50 to ": '<p style="position: relative; left: -50px; margin: 0">left</p>',
    "is not loaded: <img> 'A curve'": '<img src="missing.png" alt="A curve">',
    "is not highlighted: python 'import torch'": PYTHON.format("import torch"),
    "a script fails: ": "<script>nothing()</script>",
}


@pytest.fixture(scope="module")
def window() -> Iterator[browser.Browser]:
    assert CHROMIUM is not None
    with browser.Browser(CHROMIUM) as started:
        started.resize(WIDTH)
        yield started


def faults(content: str, folder: Path, window: browser.Browser) -> list[str]:
    """Return the faults of a page with a content."""
    (folder / "index.html").write_text(f'{HEAD}<body style="margin: 0"><main class="md-content">{content}</main>')
    with check_site.served(folder) as root:
        return check_site.faults_of_page(window, root, WIDTH)[0]


@pytest.mark.parametrize("content", GOOD.values(), ids=GOOD)
def test_what_fits_has_no_faults(content: str, tmp_path: Path, window: browser.Browser) -> None:
    assert faults(content, tmp_path, window) == []


@pytest.mark.parametrize(("fault", "content"), BAD.items(), ids=BAD)
def test_a_fault_is_named(fault: str, content: str, tmp_path: Path, window: browser.Browser) -> None:
    assert any(each.startswith(fault) for each in faults(content, tmp_path, window))


def test_a_page_that_does_not_exist_is_a_fault(tmp_path: Path, window: browser.Browser) -> None:
    with check_site.served(tmp_path) as root:
        found, _ = check_site.faults_of_page(window, f"{root}missing/", WIDTH)
    assert found == ["the page cannot be loaded: HTTP status 404"]


def test_diagrams_that_are_not_drawn_are_counted(
    tmp_path: Path, window: browser.Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_site, "DRAWING", 0.2)  # seconds; the second diagram is never drawn
    source = '<pre class="mermaid"><code>graph TD</code></pre>'
    drawn = "<script>document.querySelector('.mermaid').outerHTML = '<div class=mermaid>drawn</div>'</script>"
    (tmp_path / "index.html").write_text(f"{HEAD}{source}{source}{drawn}")
    with check_site.served(tmp_path) as root:
        assert check_site.faults_of_page(window, root, WIDTH) == ([], 1)


def test_the_status_tells_whether_there_are_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "index.html").write_text(f"{HEAD}<p>a short line</p>")
    assert check_site.main([str(tmp_path), "--screenshots", str(tmp_path / "shots"), ""]) == 0
    assert "1 pages at 1280 and 400 pixels: 0 faults" in capsys.readouterr().out
    assert (tmp_path / "shots" / "index-400.png").read_bytes().startswith(b"\x89PNG")
