"""Prompts and notebooks show short, escaped descriptions of graphs, runs and models, and never an error."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.utils.notebook import facts_table


def facts(html: str | None) -> dict[str, str]:
    """Return the facts of a table; it must have a caption and row headers, and no scripts or colours."""
    assert html is not None
    table = ET.fromstring(html)
    assert {element.tag for element in table.iter()} == {"table", "caption", "tbody", "tr", "th", "td"}
    assert {value for element in table.iter() for value in element.attrib.values()} <= {"row", "text-align: left"}
    assert table[0].tag == "caption"
    rows = [(row[0], row[1]) for row in table[1]]
    assert all(head.get("scope") == "row" for head, _ in rows)
    return {"": str(table[0].text)} | {str(head.text): str(cell.text) for head, cell in rows}


def test_text_is_escaped() -> None:
    assert facts(facts_table("<b>&", {"<i>": "</td><script>\u202e"})) == {"": "<b>&", "<i>": r"</td><script>\u202e"}


def test_a_graph(tmp_path: Path) -> None:
    graph = weft.load("digits")
    assert repr(graph) == "<Graph digits: 1,797 vertices, 19,858 edges, 64 features>"
    shown = facts(graph._repr_html_())
    assert shown.pop("") == "Graph digits"
    assert list(shown.items()) == [
        ("vertices", "1,797"),
        ("edges", "19,858"),
        ("features", "64"),
        ("classes", "10"),
        ("train vertices", "200"),
        ("val vertices", "300"),
        ("test vertices", "1,000"),
    ]
    graph.save(tmp_path / "store")
    stored = weft.Graph.open(tmp_path / "store")
    assert facts(stored._repr_html_())["stored in"] == str(tmp_path / "store")
    renamed = dataclasses.replace(graph, name="<b>\nname", in_edges=graph.in_edges.with_weight(weights(graph)))
    assert "\n" not in repr(renamed)
    assert facts(renamed._repr_html_())["edge weights"] == "yes"


def weights(graph: weft.Graph) -> Any:
    return graph.in_edges.indices.float() + 1


def test_graphs_without_features_and_with_types() -> None:
    bare = weft.Graph.from_edges([0, 1], [1, 2])
    assert repr(bare) == "<Graph graph: 3 vertices, 2 edges>"
    assert list(facts(bare._repr_html_())) == ["", "vertices", "edges"]
    typed = weft.Graph.from_edges(
        [0, 1],
        [2, 2],
        edge_type=[0, 0],
        relations=("a|to|b",),
        vertex_types=("a", "b"),
        type_offsets=(0, 2, 3),
        features={"a": [[1.0, 2.0], [3.0, 4.0]]},
        y=[0.5, 1.5, 2.5],
    )
    assert repr(typed) == "<Graph graph: 3 vertices, 2 edges, 1 relations, 2 vertex types>"
    shown = facts(typed._repr_html_())
    assert (shown["features by type"], shown["values"]) == ("2 of a", "1")


def test_a_repr_reads_no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = weft.load("digits")
    for name in ("num_classes", "label_kind", "labelled"):
        monkeypatch.setattr(weft.Graph, name, property(lambda _: pytest.fail("it reads labels")))
    assert len(repr(graph)) < 80


def test_a_run(tmp_path: Path) -> None:
    run = weft.train("digits", epochs=3, quiet=True, out=tmp_path / "a&b")
    assert repr(run) == f"<Run {tmp_path / 'a&b'}: 3 epochs, test accuracy {run.summary['test_accuracy']:.4f}>"
    shown = facts(run._repr_html_())
    assert shown[""] == f"Run {tmp_path / 'a&b'}"
    assert (shown["graph"], shown["model"], shown["strategy"]) == ("digits", "gcn", "single")
    assert shown["state"] == "finished after 3 epochs"
    assert float(shown["test accuracy"]) == pytest.approx(run.summary["test_accuracy"], rel=1e-5)
    record = run.folder / "metrics.jsonl"
    record.write_text("\n".join(record.read_text().splitlines()[:-1]) + "\n")
    stopped = weft.Run.open(run.folder)
    assert repr(stopped) == f"<Run {tmp_path / 'a&b'}: has not ended>"
    assert facts(stopped._repr_html_())["state"] == "interrupted: 3 of 3 epochs"
    record.write_text("{}\n{}\n")
    assert run._repr_html_() is None
    (run.folder / "config.toml").unlink()
    assert run._repr_html_() is None
    assert repr(run) == repr(weft.Run(folder=run.folder, summary=run.summary))


@pytest.mark.parametrize("name", ["GCN", "SAGE", "GIN", "GAT", "GATv2", "RGCN"])
def test_help_of_a_model_class(name: str) -> None:
    model_class = getattr(weft.nn, name)
    lines = pydoc.plain(pydoc.render_doc(model_class)).splitlines()
    assert lines[2].startswith(f"{name}(in_width: int, out_width: int, *, hidden: int = 64, layers: int = 2")
    assert lines[3].strip() == inspect.getdoc(getattr(weft.nn, f"{name}Conv")).splitlines()[0]
    options = inspect.signature(model_class).parameters
    assert ("heads" in options) == name.startswith("GAT")
    assert ("bases" in options) == (name == "RGCN")
    assert {"model", "args", "options"}.isdisjoint(options)


def test_a_model_class_creates_its_model() -> None:
    model = weft.nn.GAT(4, 3, hidden=8, heads=2)
    lines = [line.strip() for line in repr(model).splitlines()]
    assert "(0): GATConv(4, 8, heads=2)" in lines
    assert "(1): GATConv(8, 3, heads=2)" in lines
    assert "(0): GCNConv(4, 8)" in repr(weft.nn.GCN(4, 3, hidden=8))
