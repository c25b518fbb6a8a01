"""MkDocs hooks: pages from the root of the repository, the table of options, inline SVG pictures."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

from weft.config.config import Config
from weft.config.option import help_text

ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
"""Pages in the root of the repository, and their paths on the site."""
DRAWING = re.compile(r'<img [^>]*src="(pictures/[\w-]+\.svg)"[^>]*>')

BACKGROUND = ("changelog.md", "contributing.md", "decisions/", "design.md", "results/", "security.md")
"""Pages and folders that say why or how well weft works. The search lists them after those that say how to use it."""
BACKGROUND_BOOST = 0.05
"""Factor of the scores of these pages in the search."""

WORKER = "theme/worker.js"
ELSEWHERE = re.compile(r"""<(?!a\b|meta\b)[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from the root, with their links changed to the paths on the site."""
    for name, place in ROOT_PAGES.items():
        text = (Path(config.docs_dir).parent / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert the table of options, change links to pages from the root, and set the page's weight in the search."""
    if page.file.src_uri.startswith(BACKGROUND):
        page.meta["search"] = {"boost": BACKGROUND_BOOST}
    for name, place in ROOT_PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({place}")
    return markdown.replace("<!-- options -->", options_table())


def on_page_content(html: str, config: Any, **_: Any) -> str:
    """Inline the SVG pictures, so that they have the page's colours and a screen reader reads their titles."""
    return DRAWING.sub(lambda match: (Path(config.docs_dir) / match[1]).read_text().strip(), html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Return a page that loads nothing from other servers."""
    return self_contained(output, get_relative_url(WORKER, page.url))


def on_post_template(output: str, template_name: str, **_: Any) -> str:
    """Return a page without a source file, such as 404.html, that loads nothing from other servers."""
    return self_contained(output, WORKER) if template_name.endswith(".html") else output


def self_contained(output: str, worker: str) -> str:
    """Return a page with a local copy of the theme's worker script.

    Args:
        output: HTML of the page.
        worker: Path of the local script.

    Raises:
        PluginError: The page still loads something from another server.
    """
    output = output.replace("https://unpkg.com/iframe-worker/shim", worker)
    if match := ELSEWHERE.search(output):
        raise PluginError(f"the page loads a file from another server: {match[0]}. Use a local copy.")
    return output


def options_table() -> str:
    """Return the Markdown tables of all options of a run, by section."""
    lines: list[str] = []
    section = ""
    for spec in fields(Config):
        if spec.metadata["section"] != section:
            section = spec.metadata["section"]
            lines += ["", f"## {section}", "", "| option | default | meaning |", "|---|---|---|"]
        default = "" if spec.default == "" else f"`{spec.default}`"
        lines.append(f"| `{spec.name}` | {default} | {help_text(spec).replace('|', '&#124;')} |")
    return "\n".join(lines)
