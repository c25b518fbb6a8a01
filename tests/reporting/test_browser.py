"""In a browser, a report draws every figure without requests or errors. `make browser` installs the browser."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lib.running import train
from tests.reporting.folders import make_run
from weft.reporting.serve import ReportServer
from weft.reporting.write import read_runs, write_report
from weft.utils.files.jsonl import Recorder

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: make browser")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium: make browser")]
EVIL = "<img src=x onerror=alert(1)>"
MARKS = """figure => [...figure.querySelectorAll("svg g[class*='mark-'][class*='role-mark'] path")]
    .map(path => path.getBoundingClientRect()).filter(box => box.width + box.height > 0).length"""
"""JavaScript that counts the visible marks of a figure."""
OUT_OF_PAGE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
DRAWN = "body[data-drawn]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a report of two runs: one with a timeline, one whose name contains HTML."""
    folder = tmp_path_factory.mktemp("runs")
    graph = "sbm:vertices=300,degree=6,classes=3,features=8"
    options = {"epochs": 4, "timeline": 1, "metrics": "accuracy,roc_auc"}
    train(graph, workers=2, strategy="communicated", out=folder / "divided", **options)
    make_run(folder / EVIL, ranks=3, graph="</script><script>alert(2)</script>")
    write_report(read_runs([folder / "divided", folder / EVIL]), folder / "report.html")
    return folder / "report.html"


class RecordedPage:
    """A page with its requests and error messages."""

    def __init__(self, browser: Any, *, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", lambda dialog: self.messages.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def show(self, url: str) -> Any:
        """Open a page and wait until all figures are drawn."""
        self.page.goto(url)
        self.page.wait_for_selector(DRAWN, timeout=60_000)
        return self.page


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_drawn(browser: Any, report: Path, width: int, scheme: str) -> None:
    recorded = RecordedPage(browser, width=width, scheme=scheme)
    page = recorded.show(report.as_uri())
    figures = page.query_selector_all("figure")
    assert len(figures) >= 16
    assert {f"figure-{name}" for name in ("confusion-0", "by-class-0", "roc", "precision-recall")} <= {
        figure.get_attribute("id") for figure in figures
    }
    for figure in figures:
        assert figure.evaluate(MARKS) > 0, figure.get_attribute("id")
        box = figure.query_selector("svg").bounding_box()
        assert box["width"] <= width
    assert page.evaluate(OUT_OF_PAGE) == 0
    assert recorded.requests == [report.as_uri()]
    assert recorded.messages == []
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
    recorded.context.close()


def test_an_empty_figure_is_detected(browser: Any, report: Path, tmp_path: Path) -> None:
    """A page without data (a planted error) has figures without marks."""
    text = report.read_text()
    begin = text.index('id="records">') + len('id="records">')
    end = text.index("</script>", begin)
    emptied = tmp_path / "emptied.html"
    emptied.write_text(text[:begin] + json.dumps({name: [] for name in json.loads(text[begin:end])}) + text[end:])
    recorded = RecordedPage(browser)
    figures = recorded.show(emptied.as_uri()).query_selector_all("figure")
    assert [figure.evaluate(MARKS) for figure in figures if figure.get_attribute("id") != "figure-balance"][:3] == [
        0
    ] * 3
    recorded.context.close()


def test_buttons_zoom_and_tables_open(browser: Any, report: Path) -> None:
    recorded = RecordedPage(browser)
    page = recorded.show(report.as_uri())
    for name in ("loss", "timeline-0", "rank-seconds"):
        labels = f"[...document.querySelectorAll('#figure-{name} svg .role-axis-label text')]"
        shown = f"{labels}.map(label => label.textContent).sort().join()"
        whole = page.evaluate(shown)
        page.focus(f"#figure-{name}-in")
        page.keyboard.press("Enter")
        page.wait_for_function(f"whole => {shown} !== whole", arg=whole)
        page.click(f"#figure-{name}-all")
        page.wait_for_function(f"whole => {shown} === whole", arg=whole)
    page.click("#figure-loss-table summary")
    page.wait_for_selector("#figure-loss-table tbody tr")  # the page fills a table when it is opened
    rows = page.query_selector_all("#figure-loss-table tbody tr")
    assert len(rows) == 4 + 4 + 3  # training and validation losses of the first run, training losses of the second
    assert rows[0].inner_text().split("\t")[:3] == ["divided", "train", "1"]
    assert recorded.messages == []
    recorded.context.close()


def test_switches_change_a_figure(browser: Any, report: Path) -> None:
    recorded = RecordedPage(browser)
    page = recorded.show(report.as_uri())
    for figure, switch in (
        ("loss", "input[type=checkbox]"),
        ("score-0", "select"),
        ("confusion-0", "select"),
        ("roc", "select"),
    ):
        drawn = f"document.querySelector('#figure-{figure} svg').outerHTML"
        before = page.evaluate(drawn)
        control = page.query_selector(f"#figure-{figure} {switch}")
        control.check() if switch != "select" else control.select_option("train" if figure == "score-0" else "test")
        page.wait_for_function(f"before => {drawn} !== before", arg=before)
        assert page.query_selector(f"#figure-{figure}").evaluate(MARKS) > 0
    assert recorded.messages == []
    recorded.context.close()


def test_buttons_save_a_figure(browser: Any, report: Path) -> None:
    recorded = RecordedPage(browser, scheme="dark")
    page = recorded.show(report.as_uri())
    for form, begin in {
        "svg": b"<svg",
        "png": b"\x89PNG",
        "csv": b"run,split,epoch,loss,best\ndivided,train,1,",
    }.items():
        with page.expect_download() as saved:
            page.click(f"#figure-loss-{form}")
        assert saved.value.suggested_filename == f"loss.{form}"
        assert Path(saved.value.path()).read_bytes().startswith(begin)
    assert recorded.messages == []
    recorded.context.close()


def test_a_served_page_grows_with_its_run(browser: Any, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ended=False)
    with ReportServer([folder], 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        recorded = RecordedPage(browser)
        page = recorded.show(server.url)
        page.click("#figure-loss-table summary")
        recorder = Recorder(folder / "metrics.jsonl")
        recorder.write("epoch", epoch=3, loss=0.125, lr=0.01, seconds=1.0)
        page.wait_for_selector("#figure-loss-table tbody tr:nth-child(4)", timeout=30_000)
        assert "0.125" in page.inner_text("#figure-loss-table tbody tr:nth-child(4)")
        assert page.query_selector("#figure-loss").evaluate(MARKS) > 0
        recorder.write("event", event="stopped", epoch=3, signal=15)
        recorder.close()
        page.wait_for_function("document.body.innerText.includes('stopped after 4 epochs')", timeout=30_000)
        assert set(recorded.requests) == {server.url}
        assert recorded.messages == []
        server.shutdown()
        thread.join()
        recorded.context.close()
