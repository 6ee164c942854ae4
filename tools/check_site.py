"""Check the built documentation site in a headless Chromium.

    make docs && python tools/check_site.py build/site
    python tools/check_site.py build/site --screenshots FOLDER docs/rpc/ ARCHITECTURE/
    python tools/check_site.py build/site --mermaid node_modules/mermaid/dist/mermaid.min.js    # without internet

On each page, on a wide and on a narrow screen: nothing is cut off or wider than the window, except in a box that
scrolls; pictures are loaded; code is highlighted; scripts raise no error; diagrams are drawn, where mermaid can be
loaded. On the whole site: navigation leads to every page, and a search to the page that has the answer. Prints the
faults; status 1 if there are any.
"""

import argparse
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from browser import Browser, find_chromium

WIDTHS = (1280, 400)  # pixels: of a laptop and of a phone
DRAWING = 10.0  # seconds in which mermaid is loaded and draws all diagrams of a page
SEARCHES = {"RpcTimeout": "docs/reference/errors/", "micro-batches": "docs/pipelines/", "cartpole": "docs/examples/"}
"""Query -> a page among its results."""

SCRIPT = (Path(__file__).with_suffix(".js")).read_text(encoding="utf-8").partition("(width)")
FAULTS_OF_PAGE = SCRIPT[1] + SCRIPT[2]

MERMAID_SOURCE = "https://unpkg.com/mermaid"  # from where the theme loads it
# The theme takes the class from what it draws, or cannot draw, so diagrams are counted in the source of the page.
DIAGRAMS = (
    "fetch(location).then((page) => page.text()).then((text) => text.split('<pre class=\"mermaid\">').length - 1)"
)
DRAWN = "document.querySelectorAll('div.mermaid').length"
RESULTS = "[...document.querySelectorAll('.md-search-result__link')].map((each) => each.href)"
MARKS = "document.querySelectorAll('.md-content mark').length"
MENU = "document.querySelector('.md-sidebar--primary').getBoundingClientRect().left"
LISTED = "[...document.querySelectorAll('.md-nav--primary a[href]')].map((each) => each.href.split('#')[0])"
TABS = "document.querySelectorAll('.md-tabs__link')"
ACTIVE = "document.querySelector('.md-tabs__item--active')?.textContent.trim()"


class Quiet(SimpleHTTPRequestHandler):
    """Handler of requests that logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder to this machine, and give its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def pages(site: Path) -> list[str]:
    """Return the addresses of all pages, relative to the site."""
    found = [str(path.parent.relative_to(site)) for path in site.rglob("index.html")]
    return sorted("" if path == "." else f"{path}/" for path in found)


def faults_of_page(browser: Browser, address: str, width: int) -> tuple[list[str], int]:
    """Open a page; return its faults and the number of diagrams that are not drawn."""
    browser.open(address)
    diagrams = browser.evaluate(DIAGRAMS)
    browser.wait_until(f"{DRAWN} >= {diagrams}", DRAWING)
    undrawn = diagrams - browser.evaluate(DRAWN)
    status = browser.evaluate("performance.getEntriesByType('navigation')[0].responseStatus")
    if status >= 400:
        return [f"the page cannot be loaded: HTTP status {status}"], 0
    found: list[str] = browser.evaluate(f"({FAULTS_OF_PAGE})({width})")
    errors = browser.take_events("Runtime.exceptionThrown")
    for details in (each["exceptionDetails"] for each in errors):
        text = details.get("exception", {}).get("description", details["text"]).partition("\n")[0]
        if MERMAID_SOURCE not in text:  # the diagrams are counted instead
            found.append(f"a script fails: {text}")
    return found, undrawn


def faults_of_navigation(browser: Browser, root: str, expected: Sequence[str]) -> list[str]:
    """Return missing pages of the menu, and menus that do not open or lead elsewhere."""
    found = []
    browser.resize(WIDTHS[-1])
    browser.open(root)
    if browser.evaluate(MENU) >= 0:
        found.append("the menu covers a narrow screen before it is opened")
    browser.evaluate("document.querySelector('label.md-header__button[for=__drawer]').click()")
    if not browser.wait_until(f"{MENU} >= 0"):
        found.append("the menu does not open on a narrow screen")
    listed = set(browser.evaluate(LISTED))
    found += [f"the menu lacks {page}" for page in expected if root + page not in listed]

    browser.resize(WIDTHS[0])
    browser.open(root)
    for tab in range(browser.evaluate(f"{TABS}.length")):
        browser.open(root)
        name = browser.evaluate(f"{TABS}[{tab}].textContent.trim()")
        browser.evaluate(f"{TABS}[{tab}].click()")
        browser.wait_for("Page.loadEventFired")
        if (active := browser.evaluate(ACTIVE)) != name:
            found.append(f"the tab '{name}' leads to the part '{active}'")
    return found


def faults_of_search(browser: Browser, root: str, width: int) -> list[str]:
    """Type queries into the search; return those without the page that has the answer."""
    found = []
    browser.resize(width)
    for query, goal in SEARCHES.items():
        browser.open(root)
        browser.evaluate("document.querySelector('label[for=__search]').click()")
        browser.evaluate("document.querySelector('.md-search__input').focus()")
        browser.call("Input.insertText", text=query)
        browser.wait_until(f"{RESULTS}.length")
        results = [each.removeprefix(root) for each in browser.evaluate(RESULTS)]
        chosen = [i for i, each in enumerate(results) if each.startswith(goal) and re.search(r"[?&]h=[^#&]", each)]
        if not chosen:
            found.append(f"the search for '{query}' does not find {goal}, but {', '.join(results) or 'nothing'}")
            continue
        browser.evaluate(f"document.querySelectorAll('.md-search-result__link')[{chosen[0]}].click()")
        browser.wait_for("Page.loadEventFired")
        if not browser.wait_until(MARKS):
            found.append(f"the result of '{query}' in {goal} does not mark the word")
    return found


def main(words: Sequence[str]) -> int:
    """Check a site, and print its faults; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="folder that `make docs` has made")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="addresses within the site (default: all)")
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER", help="write each page as PNG")
    parser.add_argument("--mermaid", type=Path, metavar="FILE", help="the script to give to pages with diagrams")
    args = parser.parse_intermixed_args(words)
    program, every = find_chromium(), pages(args.site)
    if program is None:
        parser.error("there is no Chromium; on Debian: apt install chromium")
    if not every:
        parser.error(f"there are no pages in {args.site}; make docs")
    faults, missing, chosen = 0, 0, args.pages or every

    def report(place: str, found: Sequence[str]) -> None:
        nonlocal faults
        faults += len(found)
        for fault in found:
            print(f"{place}: {fault}", flush=True)

    with served(args.site) as root, Browser(program) as browser:
        if args.mermaid is not None:
            browser.replace(f"{MERMAID_SOURCE}*", args.mermaid.read_bytes())
        for width in WIDTHS:
            browser.resize(width)
            for page in chosen:
                found, undrawn = faults_of_page(browser, root + page, width)
                report(f"{page or 'the first page'} at {width} pixels", found)
                missing += undrawn
                if args.screenshots is not None:
                    args.screenshots.mkdir(parents=True, exist_ok=True)
                    browser.screenshot(args.screenshots / f"{page.strip('/').replace('/', '-') or 'index'}-{width}.png")
            if not args.pages:
                report(f"search at {width} pixels", faults_of_search(browser, root, width))
        if not args.pages:
            report("navigation", faults_of_navigation(browser, root, every))
    if missing and args.mermaid is not None:
        report("diagrams", [f"{missing} are not drawn"])
    elif missing:
        print(f"diagrams: {missing} are shown as text, because mermaid could not be loaded; see --mermaid")
    print(f"{len(chosen)} pages at {' and '.join(map(str, WIDTHS))} pixels: {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
