"""The generated pages docs/results/*.md contain all measurements of benchmarks/results, and are up to date."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tests.lib.pages import ROOT


@pytest.fixture
def result_pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr("sys.argv", ["result_pages.py", "--check"])
    return importlib.import_module("result_pages")


def test_pages_are_up_to_date(result_pages: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert result_pages.main() == 0, capsys.readouterr().out


def test_an_outdated_page_is_found(
    result_pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(result_pages, "ROOT", tmp_path)
    monkeypatch.setattr(result_pages, "PAGES", tmp_path)
    for page in result_pages.SPEC["page"]:
        (tmp_path / f"{page['name']}.md").write_text(result_pages.page_text(page))
    (tmp_path / "kernels.md").write_text("typed by hand")
    assert result_pages.main() == 1
    assert capsys.readouterr().out == "kernels.md is out of date: run python benchmarks/result_pages.py\n"


def test_every_measurement_is_on_a_page() -> None:
    """A new file in benchmarks/results needs a table in benchmarks/result_pages.toml."""
    text = "".join(path.read_text() for path in (ROOT / "docs" / "results").glob("*.md"))
    files = [path.relative_to(ROOT) for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    assert [str(path) for path in files if f"`{path}`" not in text] == []


def test_a_column_without_values_is_refused(result_pages: ModuleType) -> None:
    table = {"title": "Sums", "files": ["kernels-zen4-2cores"], "columns": [["GPU", "seconds gpu"], ["width", "width"]]}
    with pytest.raises(ValueError, match=r"Sums: no values for \['GPU'\]"):
        list(result_pages.table_parts(table))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("200mbit", "200 Mbit/s"),
        ("rmat:vertices=60k,edges=4.65m,undirected=1", "R-MAT, 60k vertices, 4.65 million edges"),
        ("hybrid@0.25", "hybrid, cached fraction 0.25"),
        ("pipeline#8:balanced-inter-eager", "pipeline, 8 chunks, balanced partition, without inter, eager"),
        ("tensor+decoupled", "tensor, decoupled"),
        ("weft-without-lines", "weft, without lines"),
        (True, "yes"),
    ],
)
def test_words(value: object, text: str, result_pages: ModuleType) -> None:
    assert result_pages.words(value) == text


@pytest.mark.parametrize(
    ("expression", "kind", "text"),
    [
        ("seconds weft", "", "20.0 (10.0 to 30.0) ms"),
        ("seconds dgl / seconds weft", "", "3.00x (2.00x to 4.00x)"),
        ("peak_bytes", "", "1.50 GB"),
        ("sizes:1", "", "12,345"),
        ("missing | peak_bytes", "", "1.50 GB"),
        ("share", "percent", "25.0%"),
        ("missing", "", ""),
    ],
)
def test_cells(expression: str, kind: str, text: str, result_pages: ModuleType) -> None:
    row = {"seconds": {"weft": [0.01, 0.02, 0.03], "dgl": [0.02, 0.06, 0.12]}, "peak_bytes": 1_500_000_000}
    row |= {"sizes": [1, 12_345], "share": 0.25}
    assert result_pages.cell(dict(result_pages.flat(row)), expression, kind) == text
