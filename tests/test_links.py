"""Links, anchors and files that the documentation names exist; `make docs` checks the site in the same way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lib.pages import PAGES, ROOT

FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
OBJECT = re.compile(r"^::: (\S+)$", re.MULTILINE)
FORMER = re.compile(r'<a id="([^"]+)"></a>')
"""Anchor of a heading that was renamed, for links from other sites."""
NAMED = re.compile(r"`((?:\.ci|benchmarks|csrc|docs|examples|tests|weft)/[a-z0-9_/.-]+)`")
"""A file of the repository in the text; names with capitals or stars stand for others."""


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_page_names_is_there(page: Path) -> None:
    assert missing(page) == []


def missing(page: Path) -> list[str]:
    """Return link targets (with their anchors) and files that a page names and that do not exist."""
    text = page.read_text()
    prose = FENCED.sub("", text)
    links = [target for target in LINK.findall(prose) if not target.startswith(("https:", "mailto:"))]
    return [
        *(target for target in links if not resolves(page, target)),
        *(name for name in NAMED.findall(prose) if not (ROOT / name).exists()),
    ]


def resolves(page: Path, target: str) -> bool:
    """Return True if a link's file exists, and so does the heading or documented object that its anchor names."""
    name, _, anchor = target.partition("#")
    path = page.parent / name if name else page
    return path.is_file() and (not anchor or anchor in anchors(path.read_text()))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: headings as GitHub and the site name them, their former names, and objects."""
    headings = HEADING.findall(FENCED.sub("", text))
    named = {*OBJECT.findall(text), *FORMER.findall(text)}
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings} | named


def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "# A title, in `code`\n\n::: weft.train\n\n```text\n# no title\n```\n"
    (tmp_path / "other.md").write_text(text + '<a id="former"></a>\n')
    good = [
        "other.md",
        "other.md#former",
        "other.md#a-title-in-code",
        "other.md#weft.train",
        "#here",
        "https://elsewhere.example",
    ]
    bad = ["gone.md", "other.md#no-title", "other.md#weft.run", "#there"]
    links = "\n".join(f"[x]({target})" for target in good + bad)
    page.write_text(f"# Here\n{links}\n`weft/gone.py` `weft/cli/main.py`")
    assert missing(page) == [*bad, "weft/gone.py"]
