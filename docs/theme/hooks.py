"""What mkdocs does besides: pages that lie beside docs/, a table of all options, drawings in the text's colour."""

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

BESIDE = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
"""Pages in the root of the repository, and where they are on the site."""
DRAWING = re.compile(r'<img [^>]*src="(pictures/[\w-]+\.svg)"[^>]*>')

WORKER = "theme/worker.js"
ELSEWHERE = re.compile(r"""<(?!a\b|meta\b)[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from the root, whose links are from there."""
    for name, place in BESIDE.items():
        text = (Path(config.docs_dir).parent / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the table of options in its place, and links to the pages from the root where they are here."""
    for name, place in BESIDE.items():
        markdown = markdown.replace(f"](../{name}", f"]({place}")
    return markdown.replace("<!-- options -->", options_table())


def on_page_content(html: str, config: Any, **_: Any) -> str:
    """Puts drawings into the page itself, so that they have its colours and a screen reader reads their title."""
    return DRAWING.sub(lambda found: (Path(config.docs_dir) / found[1]).read_text().strip(), html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """A page that asks no other server for anything."""
    return self_contained(output, get_relative_url(WORKER, page.url))


def on_post_template(output: str, template_name: str, **_: Any) -> str:
    """The same of pages without a source."""
    return self_contained(output, WORKER) if template_name.endswith(".html") else output


def self_contained(output: str, worker: str) -> str:
    """A page with weft's own worker for the theme's. PluginError where it still loads something from elsewhere."""
    output = output.replace("https://unpkg.com/iframe-worker/shim", worker)
    if found := ELSEWHERE.search(output):
        raise PluginError(f"the site would load from the network: {found[0]}")
    return output


def options_table() -> str:
    """The options of a run, section by section, from the one schema."""
    lines: list[str] = []
    section = ""
    for spec in fields(Config):
        if spec.metadata["section"] != section:
            section = spec.metadata["section"]
            lines += ["", f"## {section}", "", "| option | default | what |", "|---|---|---|"]
        default = "" if spec.default == "" else f"`{spec.default}`"
        lines.append(f"| `{spec.name}` | {default} | {help_text(spec).replace('|', '&#124;')} |")
    return "\n".join(lines)
