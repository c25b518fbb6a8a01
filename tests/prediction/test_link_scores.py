"""Best targets and scores of pairs equal those of the embeddings, under any strategy, and are written with names."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from torch import Tensor

import weft
from tests.data.test_links import make
from tests.lib.running import complaints, run_on_ranks, train
from weft.cli.main import main
from weft.data import Graph, Links, VertexNames
from weft.data.vertex_names import Texts
from weft.prediction.link_scores import TopTargets
from weft.training.run import Run
from weft.utils.errors import InputError

OPTIONS: dict[str, Any] = {"task": "link", "epochs": 2, "dtype": "float64", "hidden": 6, "quiet": True, "seed": 1}
NAMES = [f"v{number}" for number in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("links")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """A run on two relations, with DistMult."""
    names = VertexNames.of(Texts.of(NAMES), "user_id")
    replace(make("bipartite"), vertex_names=names).save(folder / "graph")
    options = {**OPTIONS, "inverse_relations": True, "decoder": "distmult"}
    return train(str(folder / "graph"), "lightgcn", out=folder / "run", **options)


def scores_of(run: Run, source: int, relation: int) -> Tensor:
    """Return the scores [60] of a source with all vertices, from the embeddings."""
    z, model = weft.predict(run, what="embeddings"), run.model
    assert isinstance(z, Tensor)
    assert isinstance(model.decoder, weft.nn.DistMult)
    return ((z[source] * model.decoder.weight[relation]) @ z.t()).detach()


def training_links(run: Run, folder: Path) -> Links:
    from weft.training.tasks.task import graph_for_task

    return Links.of(graph_for_task(Graph.open(folder / "graph"), run.config))


@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("tensor", 2), ("communicated", 3)])
def test_top(strategy: str, workers: int, run: Run, folder: Path) -> None:
    """Targets are the best candidates that are no training links; sources without enough of them have fewer."""
    options = {"strategy": strategy, "top": 12}
    if workers == 1:
        top = weft.predict(run, **options)
    else:
        top = run_on_ranks(workers, weft.predict, run.folder, **options).result
    assert isinstance(top, TopTargets)
    assert top.source.tolist() == [*range(20), *range(20)]
    edges = {tuple(link) for link in training_links(run, folder).edges.tolist()}
    for row in range(40):
        source, relation = int(top.source[row]), int(top.relation[row])
        scores = scores_of(run, source, relation)
        candidates = [v for v in range(20, 60) if (source, v, relation) not in edges]
        expected = sorted(candidates, key=lambda v: -scores[v].item())[:12]
        assert top.target[row].tolist() == expected + [-1] * (12 - len(expected))
        torch.testing.assert_close(top.score[row, : len(expected)], scores[expected].float())


def test_top_of_some_sources(run: Run, folder: Path) -> None:
    """The rows of chosen sources are those that all sources have, in the order of the ids, for each relation."""
    every, some = weft.predict(run, top=3), weft.predict(run, top=3, ids=["v7", "v2"])
    rows = torch.tensor([7, 2, 27, 22])
    on_two_ranks = run_on_ranks(2, weft.predict, run.folder, strategy="tensor", top=3, ids=["v7", "v2"]).result
    for part, part_on_ranks, part_of_all in zip(some, on_two_ranks, every, strict=True):
        torch.testing.assert_close(part, part_of_all[rows])
        torch.testing.assert_close(part_on_ranks, part_of_all[rows])
    (folder / "ids.csv").write_text("id\nv7\nv2\n")
    out = folder / "some.csv"
    assert main(["predict", str(run.folder), "--top", "3", "--ids", str(folder / "ids.csv"), "--out", str(out)]) == 0
    assert [row["source"] for row in read(out)] == (["v7"] * 3 + ["v2"] * 3) * 2
    with pytest.raises(InputError, match="--top: 'v30' is of a vertex type that is no source"):
        weft.predict(run, top=3, ids=["v7", "v30"])
    with pytest.raises(InputError, match="--ids names no source for --top: give at least one"):
        weft.predict(run, top=3, ids=[])
    with pytest.raises(InputError, match="--ids: 'w' is no vertex's user_id"):
        weft.predict(run, top=3, ids=["w"])


def test_files(run: Run, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files have names of vertices and relations; pairs keep their order."""
    top = weft.predict(run, top=3)
    assert isinstance(top, TopTargets)
    for suffix in (".parquet", ".csv"):
        out = folder / f"top{suffix}"
        assert main(["predict", str(run.folder), "--top", "3", "--out", str(out)]) == 0
        assert "best targets [40, 3]" in capsys.readouterr().out
        rows = read(out)
        assert len(rows) == 120
        assert [row["source"] for row in rows[:4]] == ["v0", "v0", "v0", "v1"]
        assert [row["target"] for row in rows] == [NAMES[v] for v in top.target.flatten().tolist()]
        assert [int(row["rank"]) for row in rows] == [1, 2, 3] * 40
        assert {row["relation"] for row in rows[:60]} == {"user|buys|item"}
        assert [float(row["score"]) for row in rows] == pytest.approx(top.score.flatten().tolist())
    pairs = pyarrow.table(
        {"source": ["v7", "v0", "v7"], "target": ["v33", "v20", "v21"], "relation": ["user|sees|item"] * 3}
    )
    parquet.write_table(pairs, folder / "pairs.parquet")
    out = folder / "scores.csv"
    assert main(["predict", str(run.folder), "--pairs", str(folder / "pairs.parquet"), "--out", str(out)]) == 0
    rows = read(out)
    assert [(row["source"], row["target"], row["relation"]) for row in rows] == list(
        zip(*pairs.to_pydict().values(), strict=True)
    )
    expected = [scores_of(run, 7, 1)[33], scores_of(run, 0, 1)[20], scores_of(run, 7, 1)[21]]
    assert [float(row["score"]) for row in rows] == pytest.approx([score.item() for score in expected], abs=1e-9)
    scores = run_on_ranks(2, weft.predict, run.folder, strategy="tensor", pairs=pairs).result
    assert scores.tolist() == pytest.approx([score.item() for score in expected], abs=1e-9)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return rows
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_ids_of_a_reordered_graph(tmp_path: Path) -> None:
    """Without names, vertices have their original ids, whatever the order of the run."""
    make("directed").save(tmp_path / "graph")
    options = {**OPTIONS, "random_features": 4, "dropout": 0.0}
    plain, ordered = (
        train(str(tmp_path / "graph"), out=tmp_path / order, order=order, **options) for order in ("none", "bfs")
    )
    first, second = weft.predict(plain, top=5), weft.predict(ordered, top=5)
    assert torch.equal(first.target, second.target)
    torch.testing.assert_close(first.score, second.score)
    pairs = {"source": np.array([3, 1]), "target": np.array([2, 50])}
    scores = weft.predict(plain, pairs=pairs)
    torch.testing.assert_close(scores, weft.predict(ordered, pairs=pairs))
    (tmp_path / "pairs.csv").write_text("target,source\n2,3\n50,1\n")
    assert torch.equal(weft.predict(plain, pairs=tmp_path / "pairs.csv"), scores)
    assert not (first.target == first.source[:, None]).any()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--top", "0"], "--top 0: give at least 1"),
        (["--top", "3", "--what", "classes"], "--top 3: --what and --layer have no effect on scores of links"),
        (["--top", "3", "--pairs", "pairs.csv"], "--top 3 and --pairs exclude each other"),
        (["--top", "3", "--out", "top.npy"], "unknown format of --out '.npy': choose one of .csv, .parquet"),
        (["--pairs", "columns.csv"], "--pairs needs the columns source, target, relation, and it has "),
        (["--pairs", "names.csv"], "column 'source', row 1: 'v60' is no vertex's id"),
        (
            ["--pairs", "relations.csv"],
            "column 'relation', row 0: is no relation: give one of user|buys|item, user|sees|",
        ),
    ],
)
def test_mistakes(
    arguments: list[str],
    error: str,
    run: Run,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    del folder
    monkeypatch.chdir(tmp_path)
    Path("columns.csv").write_text("source,item,relation\nv1,v30,user|buys|item\n")
    Path("names.csv").write_text("source,target,relation\nv1,v30,user|buys|item\nv60,v30,user|buys|item\n")
    Path("relations.csv").write_text("source,target,relation\nv1,v30,user|rents|item\n")
    out = [] if "--out" in arguments else ["--out", "out.csv"]
    assert main(["predict", str(run.folder), *arguments, *out]) == 2
    (line,) = complaints(capsys.readouterr().err)
    assert error in line
    assert not Path("out.csv").exists()


def test_other_tasks_are_refused(tmp_path: Path) -> None:
    run = weft.train("digits", out=tmp_path / "run", epochs=1, quiet=True)
    with pytest.raises(InputError, match="--top 3 needs a run with --task link, and this one predicts labels"):
        weft.predict(run, top=3)
