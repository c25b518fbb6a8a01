"""Predictions: equal to an evaluation under every strategy; embeddings, other graphs, formats, errors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import weft
from tests.cli.test_main import mistake
from tests.lib.graphs import make_graph, with_few_labels
from tests.lib.ranks import on_ranks
from tests.lib.running import command, complaints, finish, run_on_ranks, start, train
from weft.cli.main import main
from weft.comm import Group
from weft.config.optimisations import Optimisations
from weft.data import Graph, reorder
from weft.nn import Embedding, Stack, Workload
from weft.nn.layers.conv import SAGEConv
from weft.prediction import prediction
from weft.runtime.memory.tensor_peak import TensorPeak
from weft.storage.table_file import TableFile
from weft.strategies import get_strategy
from weft.strategies.offload.placed import PlacedOffload
from weft.strategies.offload.plan import OffloadPlan
from weft.training.flag_checks import make_options
from weft.training.run import Run
from weft.training.tasks import row_batching
from weft.utils.files.file_writing import is_draft
from weft.utils.units import parse_bytes

OPTIONS: dict[str, Any] = {"epochs": 3, "dtype": "float64", "hidden": 8, "layers": 3, "dropout": 0.2, "quiet": True}
PLACEMENTS = [
    ("single", 1, {}),
    ("tensor", 2, {}),
    ("hybrid", 2, {"partition": "random", "cache_ratio": 0.5}),
    ("offload", 2, {"chunks": 3}),
    pytest.param("offload", 1, {"device_memory": "2MB"}, marks=pytest.mark.slow),
    pytest.param("tensor", 3, {"chunks": 2}, marks=pytest.mark.slow),
    pytest.param("hybrid", 3, {"partition": "random"}, marks=pytest.mark.slow),
    pytest.param("offload", 3, {"chunks": 3}, marks=pytest.mark.slow),
    pytest.param("pipeline", 2, {"chunks": 2}, marks=pytest.mark.slow),
]


def predict(run: Any, *arguments: Any, workers: int = 1, **options: Any) -> Tensor:
    """Return the rows of `weft.predict` on this number of ranks."""
    if workers == 1:
        return weft.predict(run, *arguments, workers=1, **options)
    rows: Tensor = run_on_ranks(workers, weft.predict, run, *arguments, **options).result
    return rows


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a graph in which few vertices have labels."""
    folder = tmp_path_factory.mktemp("graphs") / "graph"
    with_few_labels(make_graph(150), 4).save(folder)
    return folder


@pytest.fixture(scope="module")
def run(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(str(store), "gat", out=tmp_path_factory.mktemp("runs") / "run", norm="layer", residual=True, **OPTIONS)


def evaluated(group: Group, folder: Path, store: Path, strategy: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the vertices of a rank and their rows in an evaluation of all rows, computed without `predict`."""
    graph = Graph.open(store)
    config = replace(Run.open(folder).config, strategy=strategy, workers=group.size, **options)
    work = Workload(weft.load_model(folder), graph, Optimisations.without("reach"))
    placed = get_strategy(strategy)(work, group.size, make_options(config, graph)).place(group)
    rows = placed.forward(placed.evaluation(7)).detach().clone()
    return torch.arange(graph.num_vertices)[placed.rows], rows


@pytest.mark.parametrize(("strategy", "workers", "options"), PLACEMENTS)
def test_logits_equal_an_evaluation(
    strategy: str, workers: int, options: dict[str, Any], run: Run, store: Path
) -> None:
    predicted = predict(run.folder, workers=workers, strategy=strategy, **options)
    evaluated_rows = torch.full_like(predicted, torch.nan)
    for vertices, rows in on_ranks(workers, evaluated, run.folder, store, strategy, options):
        evaluated_rows[vertices] = rows
    assert torch.equal(predicted, evaluated_rows)
    torch.testing.assert_close(predicted, predict(run), rtol=1e-9, atol=1e-9)


def test_predictions_have_the_scores_of_the_run(run: Run, store: Path) -> None:
    """Steps of this run leave out rows that are not scored; a prediction contains all rows."""
    assert "reach" in run.records[0]["placement"][0]
    graph, classes = weft.load(str(store)), weft.predict(run, what="classes")
    assert torch.equal(classes, weft.predict(run).argmax(1))
    for split in ("train", "val"):
        vertices = graph.labelled(split)
        assert vertices is not None
        right = (classes[vertices] == graph.y[vertices]).double().mean()  # type: ignore[index]
        assert float(right) == pytest.approx(run.summary[f"{split}_accuracy"], rel=1e-12)
    assert weft.predict(run).isfinite().all()


@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("tensor", 2), ("communicated", 2), ("offload", 2)])
@pytest.mark.parametrize("layer", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_embeddings_equal_the_output_of_a_hook(strategy: str, workers: int, layer: int, run: Run, store: Path) -> None:
    embeddings = predict(run.folder, workers=workers, strategy=strategy, what="embeddings", layer=layer)
    torch.testing.assert_close(embeddings, hooked(run, weft.load(str(store)), layer), rtol=1e-9, atol=1e-9)
    if layer == 2:
        assert torch.equal(embeddings, predict(run.folder, workers=workers, strategy=strategy, what="embeddings"))


def hooked(run: Run, graph: Graph, layer: int) -> Tensor:
    """Return the output rows of a layer, recorded by a forward hook on one device."""
    model, outputs = weft.load_model(run.folder), []
    assert isinstance(model, Stack)
    model.layers[layer - 1].register_forward_hook(lambda *call: outputs.append(call[-1]))
    work = Workload(model, graph, Optimisations.without("reach"))
    placed = get_strategy("single")(work).place(Group())
    placed.forward(placed.evaluation(0))
    rows: Tensor = outputs[-1]  # the calls before are traces
    return rows


@pytest.mark.parametrize("strategy", ["split", "sampled", "stale"])
def test_strategies_that_evaluate_with_another_strategy(strategy: str, store: Path, tmp_path: Path) -> None:
    """Predictions need no labels, although these strategies train on batches of labelled vertices."""
    run = train(str(store), "sage", out=tmp_path / "run", strategy=strategy, **OPTIONS)
    grown(weft.load(str(store))).save(tmp_path / "more")
    for graph in (None, tmp_path / "more"):
        predicted, expected = predict(run.folder, graph, workers=2), predict(run.folder, graph, strategy="single")
        torch.testing.assert_close(predicted, expected, rtol=1e-9, atol=1e-9)


def test_rows_are_ordered_by_original_ids(run: Run, store: Path, tmp_path: Path) -> None:
    graph = reorder(weft.load(str(store)), "degree")
    assert graph.ids is not None
    assert not torch.equal(graph.ids, graph.ids.sort().values)
    graph.save(tmp_path / "graph")
    for options in ({}, {"workers": 2, "strategy": "tensor"}):
        rows = predict(run.folder, tmp_path / "graph", **options)
        torch.testing.assert_close(rows, predict(run), rtol=1e-9, atol=1e-9)
    ordered = train(str(store), out=tmp_path / "run", order="bfs", **OPTIONS)
    plain = predict(ordered, weft.Graph.open(store), out=tmp_path / "rows.npy")
    torch.testing.assert_close(predict(ordered), plain, rtol=1e-9, atol=1e-9)


def grown(graph: Graph) -> Graph:
    """Return the graph with three more vertices without labels, which have no edges to the previous vertices."""
    source, target = graph.in_edges.edges()
    random, first = torch.Generator().manual_seed(1), graph.num_vertices
    assert graph.x is not None
    return Graph.from_edges(
        torch.cat([source.long(), torch.tensor([3, 5, first])]),
        torch.cat([target.long(), torch.tensor([first, first, first + 1])]),
        x=torch.cat([graph.x, torch.randn(3, graph.x.shape[1], generator=random)]),
    )


def test_a_graph_that_has_grown(run: Run, store: Path, tmp_path: Path) -> None:
    more = grown(weft.load(str(store)))
    predicted = predict(run, more)
    assert predicted.shape == (153, 5)
    torch.testing.assert_close(predicted[:150], predict(run), rtol=1e-9, atol=1e-9)
    assert len(predicted[150:].unique(dim=0)) == 3
    more.save(tmp_path / "more")
    assert main(["predict", str(run.folder), str(tmp_path / "more"), "--out", str(tmp_path / "rows.npy")]) == 0
    assert np.array_equal(np.load(tmp_path / "rows.npy"), predicted.numpy())
    for workers, strategy in ((2, "tensor"), (2, "offload")):
        other = predict(run.folder, tmp_path / "more", workers=workers, strategy=strategy)
        torch.testing.assert_close(other, predicted, rtol=1e-9, atol=1e-9)


def test_typed_vertices(tmp_path: Path) -> None:
    from tests.lib.graphs import make_typed_graph

    graph = make_typed_graph(23, "some")
    run = train(graph, "rgcn", out=tmp_path / "run", **OPTIONS)
    assert any(isinstance(module, Embedding) for module in run.model.modules())
    graph.save(tmp_path / "graph")
    predicted = predict(run, graph)
    assert torch.equal(predicted.argmax(1), predict(run, tmp_path / "graph", what="classes"))
    for strategy in ("hybrid", "offload"):
        other = predict(run.folder, tmp_path / "graph", workers=2, strategy=strategy)
        torch.testing.assert_close(other, predicted, rtol=1e-9, atol=1e-9)
    with pytest.raises(weft.InputError, match="vertices without features, and the run's graph had 8"):
        predict(run, make_typed_graph(26, "some"))


def test_several_labels(tmp_path: Path) -> None:
    graph = make_graph(40, multilabel=True)
    run = train(graph, out=tmp_path / "run", **OPTIONS)
    classes = predict(run, graph, what="classes")
    assert classes.dtype == torch.bool
    assert torch.equal(classes, predict(run, graph) > 0)


@pytest.mark.parametrize("inverse", [False, True])
def test_rows_of_a_link_model(inverse: bool, tmp_path: Path, store: Path) -> None:
    from tests.lib.graphs import make_typed_graph

    graph = make_typed_graph(30, "none") if inverse else weft.load(str(store))
    graph.save(tmp_path / "graph")
    options = OPTIONS | {"task": "link", "hidden": 6, "inverse_relations": inverse, "decoder": "distmult"}
    run = train(str(tmp_path / "graph"), "sage", out=tmp_path / "run", **options)
    embeddings = predict(run, what="embeddings")
    assert embeddings.shape == (graph.num_vertices, 6)
    other = predict(run.folder, what="embeddings", workers=2, strategy="tensor")
    torch.testing.assert_close(other, embeddings, rtol=1e-9, atol=1e-9)
    assert torch.equal(embeddings, predict(run, what="embeddings", layer=3))
    assert predict(run, tmp_path / "graph", what="embeddings").shape == embeddings.shape
    assert isinstance(run.model, weft.nn.LinkModel)
    with pytest.raises(weft.InputError, match="a link prediction model has no classes"):
        predict(run)


def test_a_link_model_without_labels(tmp_path: Path, store: Path) -> None:
    graph = replace(weft.load(str(store)), y=None, train_mask=None, val_mask=None, test_mask=None)
    run = train(graph, out=tmp_path / "run", **OPTIONS | {"task": "link", "hidden": 6})
    assert predict(run, graph, what="embeddings").shape == (graph.num_vertices, 6)


class CustomStack(Stack):
    """Custom model that is a `Stack`."""

    def __init__(self, hidden: int) -> None:
        super().__init__([SAGEConv(7, hidden), SAGEConv(hidden, 5)])


class Wrapped(nn.Module):
    """Custom model that is not a `Stack`."""

    num_stages = 2

    def __init__(self) -> None:
        super().__init__()
        self.inner = CustomStack(8)

    def forward(self, views: Any, x: Tensor) -> Tensor:
        y: Tensor = self.inner(views, x)
        return 2 * y


def test_a_custom_model(store: Path, tmp_path: Path) -> None:
    options = {"epochs": 2, "quiet": True}
    run = train(str(store), CustomStack(8).double(), out=tmp_path / "run", **options)
    with pytest.raises(
        weft.InputError,
        match=r"its model is a .*\.CustomStack, a custom class that weft does not import by itself: create one",
    ):
        _ = Run.open(run.folder).model
    assert isinstance(run.model, CustomStack)
    with pytest.raises(weft.InputError, match="contains the weights of another model"):
        weft.load_model(run.folder, CustomStack(9).double())
    with pytest.raises(weft.InputError, match="was trained in float64: convert the model"):
        weft.load_model(run.folder, CustomStack(8))
    predicted = predict(run, model=CustomStack(8).double())
    other = predict(run.folder, workers=2, strategy="tensor", model=CustomStack(8).double())
    torch.testing.assert_close(other, predicted, rtol=1e-9, atol=1e-9)
    assert predict(run, model=CustomStack(8).double(), what="embeddings").shape == (150, 8)
    wrapped = train(str(store), Wrapped().double(), out=tmp_path / "wrapped", **options)
    assert predict(wrapped, model=Wrapped().double()).shape == (150, 5)
    with pytest.raises(weft.InputError, match="cannot find the layers of a Wrapped"):
        predict(wrapped, model=Wrapped().double(), what="embeddings")


def test_a_run_that_was_stopped(run: Run, store: Path, tmp_path: Path) -> None:
    """Predictions use the newest checkpoint, which contains the best weights so far."""
    folder = tmp_path / "run"
    whole = train(str(store), "gat", out=folder, checkpoint_every=2, **OPTIONS | {"norm": "layer", "residual": True})
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert Run.open(folder).summary == whole.summary
    assert Run.open(folder).history == [line for line in whole.records if line["kind"] == "epoch"]
    assert [line["epoch"] for line in whole.history] == [0, 1, 2]
    finished = weft.load_model(folder).state_dict()
    assert all(torch.equal(value, finished[name]) for name, value in run.model.state_dict().items())
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    (folder / "model.safetensors").unlink()
    stopped = Run.open(folder)
    assert stopped.summary == {}
    assert stopped.config == whole.config
    assert all(torch.equal(value, finished[name]) for name, value in stopped.model.state_dict().items())
    assert torch.equal(predict(stopped), predict(run))


def test_formats(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = predict(run, out=tmp_path / "rows.npy")
    assert np.load(tmp_path / "rows.npy").dtype == np.float64
    assert np.array_equal(np.load(tmp_path / "rows.npy"), predicted.numpy())
    predict(run, out=tmp_path / "rows.safetensors")
    assert torch.equal(load_file(tmp_path / "rows.safetensors")["logits"], predicted)
    predict(run, out=tmp_path / "classes.npy", what="classes")
    assert np.array_equal(np.load(tmp_path / "classes.npy"), predicted.argmax(1).numpy())
    assert os.stat(tmp_path / "rows.npy").st_mode == os.stat(run.folder / "config.toml").st_mode
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(weft.InputError, match=r"rows.parquet: needs pyarrow: pip install 'weft\[tables\]'"):
        predict(run, out=tmp_path / "rows.parquet")
    assert {path.name for path in tmp_path.iterdir()} == {"rows.npy", "rows.safetensors", "classes.npy"}


def test_parquet(run: Run, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    predicted = predict(run, out=tmp_path / "rows.parquet")
    table = parquet.read_table(tmp_path / "rows.parquet")
    assert table.column_names == [f"logit_{number}" for number in range(5)]
    assert np.array_equal(np.stack([column.to_numpy() for column in table.columns], 1), predicted.numpy())
    predict(run, out=tmp_path / "classes.parquet", what="classes")
    assert parquet.read_table(tmp_path / "classes.parquet")["class"].to_pylist() == predicted.argmax(1).tolist()


ERRORS: list[tuple[list[str], str]] = [
    (["--out", "rows.xls"], "unknown format of --out '.xls'"),
    (["--out", "no/rows.npy"], "does not exist: create it"),
    (["--out", "there.npy"], "there.npy exists already: choose another name or add --overwrite"),
    (["--out", "rows.npy", "--what", "logit"], "unknown --what 'logit': did you mean 'logits'?"),
    (["--out", "rows.npy", "--layer", "1"], "--layer 1 has no effect on logits"),
    (["--out", "rows.npy", "--what", "embeddings", "--layer", "4"], "--layer 4: the model has 3 layers: give 1 to 3"),
    (["--out", "rows.npy", "--what", "embeddings", "--layer", "0"], "--layer 0: the model has 3 layers"),
    (["--out", "rows.npy", "--chunks", "2"], "--chunks has no effect under strategy single"),
    (["--out", "rows.npy", "--epochs", "2"], "--epochs has no effect here: leave it out"),
    (["--out", "rows.npy", "--strategy", "offloat"], "unknown strategy 'offloat'"),
    (["--out", "rows.npy", "--workers", "2"], "strategy single runs on one rank"),
    (["--out", "rows.npy", "--strategy", "offload", "--device-memory", "20B"], "--device-memory 20 B: one vertex"),
    (["digits", "--out", "rows.npy"], "digits has 64 features, and the run's graph had 7"),
    (["nothing", "--out", "rows.npy"], "unknown dataset 'nothing'"),
    ([], "the following arguments are required: --out"),
]


@pytest.mark.parametrize(("arguments", "error"), ERRORS)
def test_mistakes(
    arguments: list[str],
    error: str,
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.npy").write_text("kept")
    assert error in mistake(capsys, "predict", run.folder, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["there.npy"]
    assert Path("there.npy").read_text() == "kept"


def test_overwriting(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "there.npy"
    path.write_text("gone")
    assert main(["predict", str(run.folder), "--out", str(path), "--overwrite"]) == 0
    assert np.array_equal(np.load(path), predict(run).numpy())
    assert capsys.readouterr().out == f"logits [150, 5] in {path}\n"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda folder: truncate(folder / "model.safetensors"), "model.safetensors: cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: (folder / "config.toml").unlink(), "contains no run"),
        (lambda folder: (folder / "metrics.jsonl").unlink(), "does not say how its model is made"),
    ],
)
def test_damaged_folders(
    damage: Callable[[Path], Any], error: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(str(store), out=tmp_path / "run", **OPTIONS)
    damage(tmp_path / "run")
    assert error in mistake(capsys, "predict", tmp_path / "run", "--out", tmp_path / "rows.npy")
    assert not (tmp_path / "rows.npy").exists()


def test_the_graph_has_changed_since_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_graph(40).save(tmp_path / "graph")
    train(str(tmp_path / "graph"), out=tmp_path / "run", **OPTIONS)
    make_graph(41).save(tmp_path / "graph", overwrite=True)
    error = mistake(capsys, "predict", tmp_path / "run", "--out", tmp_path / "rows.npy")
    assert "have changed since" in error
    train(make_graph(40), out=tmp_path / "other", **OPTIONS)
    error = mistake(capsys, "predict", tmp_path / "other", "--out", tmp_path / "rows.npy")
    assert "was trained on a graph from a script" in error


def test_a_decoupled_model_has_no_embeddings(store: Path, tmp_path: Path) -> None:
    run = train(str(store), out=tmp_path / "run", decoupled=True, **OPTIONS)
    assert predict(run).shape == (150, 5)
    with pytest.raises(weft.InputError, match="cannot find the layers of a Decoupled"):
        predict(run, what="embeddings")


def test_a_command_on_ranks(run: Run, tmp_path: Path) -> None:
    """Under torchrun, only rank 0 prints the result and the name of the file."""
    path = tmp_path / "rows.npy"
    output = command("predict", run.folder, "--strategy", "tensor", "--out", path, workers=2)
    assert (output.result, output.err) == (0, "")
    assert output.out == f"logits [150, 5] in {path}\n"
    torch.testing.assert_close(torch.from_numpy(np.load(path)), predict(run), rtol=1e-9, atol=1e-9)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.npy"]


def predicted_on_hosts(group: Group, run: Path, out: Path, options: dict[str, Any]) -> Tensor:
    """Predict on a rank. Ranks from 2 on emulate another host, which has no folder for the file."""
    os.environ["LOCAL_RANK"] = str(group.rank if group.rank < 2 else group.rank - 2)
    try:
        path = out if group.rank < 2 else out.parent / "nowhere" / out.name
        return weft.predict(run, out=path, **options).clone()
    finally:
        os.environ["LOCAL_RANK"] = os.environ["RANK"]


@pytest.mark.parametrize("what", ["logits", "classes"])
def test_hosts_send_their_rows(what: str, run: Run, tmp_path: Path) -> None:
    """Hosts send their rows in several blocks, and only the host of rank 0 writes the file."""
    options = {"what": what, "strategy": "communicated", "partition": "random"}
    rows_of_ranks = on_ranks(4, in_small_blocks, run.folder, tmp_path / "rows.npy", options)
    expected = weft.predict(run, what=what)
    for rows in (*rows_of_ranks[:2], torch.from_numpy(np.load(tmp_path / "rows.npy"))):
        torch.testing.assert_close(rows, expected, rtol=1e-9, atol=1e-9)
    for rows in rows_of_ranks[2:]:
        assert rows.shape == (0, *expected.shape[1:])
    assert [file.name for file in tmp_path.iterdir()] == ["rows.npy"]


def test_rows_that_are_not_sent_are_detected(run: Run, tmp_path: Path) -> None:
    options = {"strategy": "communicated", "partition": "random"}
    on_ranks(4, without_sending, run.folder, tmp_path / "rows.npy", options)
    assert not np.allclose(np.load(tmp_path / "rows.npy"), weft.predict(run).numpy(), atol=1e-9)


def without_sending(group: Group, *arguments: Any) -> Tensor:
    """Return `predicted_on_hosts` without sending rows, as if all ranks were on one host."""
    original, prediction.RowsOfRank._send_to_rank_0 = prediction.RowsOfRank._send_to_rank_0, lambda *_: None  # type: ignore[method-assign]
    try:
        return predicted_on_hosts(group, *arguments)
    finally:
        prediction.RowsOfRank._send_to_rank_0 = original  # type: ignore[method-assign]


def test_boolean_rows_are_sent() -> None:
    """Classes are boolean if vertices have several labels."""
    for rows in on_ranks(2, sent_to_rank_0)[:1]:
        assert rows.tolist() == [[True, False], [True, False], [False, True]]


def sent_to_rank_0(group: Group) -> Tensor:
    rows = torch.tensor([[True, False]]) if group.rank == 0 else torch.tensor([[True, False], [False, True]])
    return prediction.gather_on_rank_0(group, rows, [1, 2])


def in_small_blocks(group: Group, *arguments: Any) -> Tensor:
    """Return `predicted_on_hosts` with blocks of three rows."""
    original, row_batching.BLOCK_BYTES = row_batching.BLOCK_BYTES, 3 * 5 * 8
    try:
        return predicted_on_hosts(group, *arguments)
    finally:
        row_batching.BLOCK_BYTES = original


@pytest.mark.slow
def test_two_hosts_of_torchrun(run: Run, tmp_path: Path) -> None:
    """Two torchrun launchers emulate two hosts. Each has a separate output folder; only that of rank 0 gets a file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = []
    for number in range(2):
        (folder := tmp_path / str(number)).mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)]
        command += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "weft"]
        command += ["predict", str(run.folder), "--strategy", "tensor", "--out", str(folder / "rows.npy")]
        hosts.append(subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}))
    try:
        assert [host.wait(100) for host in hosts] == [0, 0]
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    torch.testing.assert_close(
        torch.from_numpy(np.load(tmp_path / "0" / "rows.npy")), predict(run), rtol=1e-9, atol=1e-9
    )
    assert list((tmp_path / "1").iterdir()) == []


def block_writes() -> None:
    """Make each write of rows to the file wait, in the command's process and in the ranks forked from it."""
    TableFile.put = lambda *_: time.sleep(100)  # type: ignore[assignment, method-assign, return-value]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_signal(workers: int, number: signal.Signals, run: Run, tmp_path: Path) -> None:
    """SIGTERM leaves no files; SIGKILL leaves no file of the final name; neither leaves a process running."""
    path = tmp_path / "rows.npy"
    options = ("--strategy", "offload", "--workers", str(workers), "--out", path)
    process = start("predict", run.folder, *options, prepare=block_writes)
    deadline = time.monotonic() + 60
    while not (drafts := list(tmp_path.iterdir())):
        assert time.monotonic() < deadline
        assert process.returncode is None
        time.sleep(0.05)
    assert [is_draft(draft.name) for draft in drafts] == [True]
    time.sleep(0.5)
    os.kill(process.pid, number)
    code, errors = finish(process)
    if number == signal.SIGKILL:
        assert code == -number
        assert not path.exists()
        return
    assert code == 128 + number
    assert errors.splitlines()[-1].startswith("weft: stopped by SIGTERM")  # after progress, on a slow machine
    assert list(tmp_path.iterdir()) == []


def test_launched_ranks(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    code, errors = finish(start("predict", run.folder, "--strategy", "tensor", "--workers", "2", "--out", path))
    assert (code, errors) == (0, "")
    torch.testing.assert_close(torch.from_numpy(np.load(path)), predict(run), rtol=1e-9, atol=1e-9)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.npy"]


def test_a_full_disk_is_reported_in_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert main(["predict", str(run.folder), "--out", str(tmp_path / "rows.npy")]) == 1
    (line,) = complaints(capsys.readouterr().err)
    assert line.endswith("No space left on device: choose a folder with enough space for --out")
    assert list(tmp_path.iterdir()) == []


def test_rows_that_a_step_leaves_out_are_detected(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction with the steps of an evaluation, which computes only scored rows, raises an error."""
    monkeypatch.setattr(prediction, "Optimisations", type("All", (), {"without": lambda _: Optimisations()}))
    with pytest.raises((IndexError, ValueError, RuntimeError)):
        predict(run)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sage", pytest.param("gat", marks=pytest.mark.slow)])
def test_stays_within_the_devices_memory(
    model: str,
    weft_data: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Peak memory counts all tensors, the loader's too; a limit that is too small is rejected before placing."""
    store, limit, peaks = tmp_path / "graph", parse_bytes("8MB", "--device-memory"), list[int]()
    weft.load(str(weft_data("tolokers"))).save(store)
    trained = train(str(store), model, out=tmp_path / "run", epochs=1, hidden=128, quiet=True)
    forward = PlacedOffload.forward

    def measured_forward(placed: PlacedOffload, step: Any) -> Tensor:
        if placed.estimate is None:  # the small chunk with which a plan estimates memory
            return forward(placed, step)
        forward(placed, step)  # the first call also allocates host memory, which does not count
        peak = TensorPeak()
        placed.chunks.__dict__["_loader"] = ThreadPoolExecutor(1, initializer=peak.__enter__)
        with peak:
            rows = forward(placed, step)
        peaks.append(peak.most)
        return rows

    monkeypatch.setattr(PlacedOffload, "forward", measured_forward)
    predicted = predict(trained, strategy="offload", device_memory="8MB")
    torch.testing.assert_close(predicted, predict(trained), rtol=1e-3, atol=1e-4)
    predict(trained, strategy="offload", device_memory="256MB")
    within, without = peaks
    assert limit / 8 < within <= limit < without
    monkeypatch.setattr(OffloadPlan, "place", lambda *_, **__: pytest.fail("placed"))
    with pytest.raises(weft.InputError, match=r"^--device-memory 50\.0 kB: one vertex .* give --device-memory"):
        predict(trained, strategy="offload", device_memory="50kB", out=tmp_path / "rows.npy")
    assert not (tmp_path / "rows.npy").exists()
