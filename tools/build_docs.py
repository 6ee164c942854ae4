"""Build the documentation site: every Markdown file of the repository at its own path, links between them intact.

First every relative link is checked. Then the documents, and the files they link to, are copied to OUT/docs-src, links
to folders (which a site does not have) are pointed at the folder's README.md or made plain text, and mkdocs, in strict
mode, makes OUT/site of that. The documents need no site to be read: they are plain Markdown, with links that work in a
checkout.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from documents import ELSEWHERE, REPO, dead_links, links, tracked

# mkdocs takes a README.md as the index of its folder, and the tree as the navigation.
CONFIG = """\
site_name: Telegrad
site_description: Tensor-native RPC for PyTorch
docs_dir: docs-src
site_dir: site
use_directory_urls: false
theme: {{name: readthedocs, highlightjs: false}}
markdown_extensions:
  - tables
  - fenced_code
  - toc:
      slugify: !!python/name:build_docs.slug
validation: {{links: {{not_found: warn, anchors: warn, unrecognized_links: warn}}, omitted_files: ignore}}
nav: {nav}
"""
FIRST = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]


def slug(title: str, separator: str) -> str:
    """Fragments as code hosts make them, so that one link works in both places."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)


def stage(document: Path, target: Path) -> None:
    """Copy one document and the files that it links to, under the same relative paths."""
    text = document.read_text()
    for _, link in links(text):
        path, _, _ = link.partition("#")
        if ELSEWHERE.match(link) or not path:
            continue
        goal = (document.parent / path).resolve()
        if goal.is_dir():
            if (goal / "README.md").exists():
                text = text.replace(f"]({link})", f"]({path.rstrip('/')}/README.md)")
            else:
                text = re.sub(rf"\[([^\]]*)\]\({re.escape(link)}\)", r"\1", text)
        elif goal.suffix != ".md":
            copy = target / goal.relative_to(REPO)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(goal, copy)
    page = target / document.relative_to(REPO)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=REPO / "build", help="folder for docs-src and site")
    out = parser.parse_args().out.resolve()

    pages = tracked()
    dead = [line for page in pages for line in dead_links(page)]
    if dead:
        print(*dead, sep="\n")
        return 1

    source = out / "docs-src"
    shutil.rmtree(source, ignore_errors=True)
    for page in pages:
        stage(page, source)
    names = [str(page.relative_to(REPO)) for page in pages]
    nav = [name for name in FIRST if name in names] + [name for name in names if name not in FIRST]
    config = out / "mkdocs.yml"
    config.write_text(CONFIG.format(nav=nav))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--quiet", "--config-file", str(config)]
    built = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)}, check=False)
    if built.returncode == 0:
        print(f"{len(pages)} documents, every link checked: {out / 'site' / 'index.html'}")
    return built.returncode


if __name__ == "__main__":
    sys.exit(main())
