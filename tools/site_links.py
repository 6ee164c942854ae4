"""Hooks of mkdocs: links to the repository, docstrings, a check of loaded files.

Links to files that are not pages become links to the repository. Scripts and styles of the pages must exist.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from documents import ELSEWHERE, REPO, links


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page. mkdocs calls this for each page."""
    folder = posixpath.dirname(page.file.src_uri)
    for target in {target for _, target in links(markdown)}:
        path, _, fragment = target.partition("#")
        if ELSEWHERE.match(target) or not path:
            continue
        goal = posixpath.normpath(posixpath.join(folder, path))
        if files.get_file_from_path(goal) is None and (Path(REPO) / goal).exists():
            kind = "tree" if (Path(REPO) / goal).is_dir() else "blob"
            url = f"{config.repo_url.rstrip('/')}/{kind}/main/{goal}" + (f"#{fragment}" if fragment else "")
            markdown = markdown.replace(f"]({target})", f"]({url})")
    return markdown


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """Remove the second colon before code blocks. mkdocs calls this for each page."""
    return re.sub(r"::</p>(?=\s*<div class=\"highlight\">)", ":</p>", html).replace(
        "<p>Example:</p>", "<p><strong>Example:</strong></p>"
    )


def on_post_build(*, config: Any) -> None:
    """Check that scripts and styles of the pages exist, which mkdocs does not do.

    Raises:
        SystemExit: A file is missing.
    """
    site = Path(config.site_dir)
    missing = {
        str(goal.relative_to(site))
        for page in site.rglob("*.html")
        for found in re.findall(r'<(?:link|script)[^>]* (?:href|src)="([^":]+\.(?:css|js))"', page.read_text())
        if page.name != "404.html" and not (goal := (page.parent / found).resolve()).exists()
    }
    if missing:
        raise SystemExit(f"the site lacks {', '.join(sorted(missing))}; see exclude_docs in mkdocs.yml")
