"""The site in a browser, opened as files: no requests, no errors, all drawings visible, and the search works."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lib.pages import ROOT

pytest.importorskip("mkdocs", reason="no mkdocs: pip install 'weft[docs]'")
sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: make browser")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium: make browser")]
ANSWERS = {
    "distributed": "cluster",
    "heterogeneous": "typed",
    "early stopping": "training",
    "hyperparameter": "configuration",
    "message passing": "own-layer",
    "node classification": "start",
    "learning rate": "training",
    "slurm": "cluster",
    "torchrun": "cluster",
    "gpu": "gpu",
    "parquet": "data",
    "metis": "partition",
    "checkpoint": "resume",
    "resume": "resume",
    "predict": "predict",
    "embeddings": "predict",
    "dropout": "models",
    "batch norm": "models",
    "inference": "predict",
    "link prediction": "link",
    "mini-batch": "strategies/split",
    "sampling": "strategies/split",
    "fanout": "strategies/split",
    "out of memory": "memory",
    "memory estimate": "plan",
    "weight decay": "training",
    "csv": "data",
    "networkx": "data",
    "dgl": "from-dgl",
    "ogb": "data",
    "attention": "models",
    "rgcn": "reference/nn",
    "custom layer": "own-layer",
    "multi machine": "cluster",
    "profile": "plan",
    "sweep": "configuration",
    "compare strategies": "strategies/index",
    "partition": "partition",
    "float64": "concepts",
    "notebook": "notebooks",
}
"""Queries of newcomers, and the page that answers each."""
RESULT = ".md-search-result__item > a.md-search-result__link"
OUT_OF_PAGE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_pages_ask_for_nothing(browser: Any, site: Path, width: int, scheme: str) -> None:
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(site.as_uri()) else messages.append(request.url))
    for name in ("index", "start", "concepts", "strategies/index", "reference/weft", "reference/config"):
        page.goto((site / f"{name}.html").as_uri())
        page.wait_for_selector(".md-search__input", state="attached")
        assert page.evaluate(OUT_OF_PAGE) == 0, name
    page.goto((site / "concepts.html").as_uri())
    drawings = page.query_selector_all("svg.picture")
    assert len(drawings) == len(list((ROOT / "docs" / "pictures").glob("*.svg")))
    for drawing in drawings:
        assert drawing.query_selector("title").text_content()
        assert drawing.query_selector("desc").text_content()
        assert drawing.bounding_box()["width"] > 300
    page.keyboard.press("/")
    page.keyboard.type("least halo")
    page.wait_for_selector(".md-search-result__item")
    assert messages == []


def test_the_first_result_answers(browser: Any, site: Path) -> None:
    """If a query fails: put its words into a heading of the page that answers it."""
    page = browser.new_page()
    first = {}
    for query in ANSWERS:
        page.goto((site / "index.html").as_uri() + "?q=" + query.replace(" ", "+"))
        page.wait_for_selector(RESULT)
        link = page.locator(RESULT).first.get_attribute("href").partition("?")[0]
        first[query] = link.removeprefix(site.as_uri() + "/").removesuffix(".html")
    page.close()
    assert first == ANSWERS
