"""Predictions: the rows of an evaluation, under every strategy; embeddings, other graphs, formats, mistakes."""

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
from weft.runtime.tensor_peak import TensorPeak
from weft.storage.table_file import TableFile
from weft.strategies import get_strategy
from weft.strategies.offload.placed import PlacedOffload
from weft.strategies.offload.plan import OffloadPlan
from weft.training.flag_checks import make_options
from weft.training.run import Run
from weft.training.tasks import row_batching
from weft.utils.units import parse_bytes

OPTIONS: dict[str, Any] = {"epochs": 3, "dtype": "float64", "hidden": 8, "layers": 3, "dropout": 0.2, "quiet": True}
PLACES = [
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
    """`weft.predict` on ranks that are there."""
    if workers == 1:
        return weft.predict(run, *arguments, workers=1, **options)
    rows: Tensor = run_on_ranks(workers, weft.predict, run, *arguments, **options).result
    return rows


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph of whose vertices few have labels."""
    folder = tmp_path_factory.mktemp("graphs") / "graph"
    with_few_labels(make_graph(150), 4).save(folder)
    return folder


@pytest.fixture(scope="module")
def run(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(str(store), "gat", out=tmp_path_factory.mktemp("runs") / "run", norm="layer", residual=True, **OPTIONS)


def evaluated(group: Group, folder: Path, store: Path, strategy: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The rows of an evaluation of all rows on a rank, and whose they are; put together without `predict`."""
    graph = Graph.open(store)
    config = replace(Run.open(folder).config, strategy=strategy, workers=group.size, **options)
    work = Workload(weft.load_model(folder), graph, Optimisations.without("reach"))
    placed = get_strategy(strategy)(work, group.size, make_options(config, graph)).place(group)
    rows = placed.forward(placed.evaluation(7)).detach().clone()
    return torch.arange(graph.num_vertices)[placed.rows], rows


@pytest.mark.parametrize(("strategy", "workers", "options"), PLACES)
def test_logits_are_those_of_an_evaluation(
    strategy: str, workers: int, options: dict[str, Any], run: Run, store: Path
) -> None:
    found = predict(run.folder, workers=workers, strategy=strategy, **options)
    whole = torch.full_like(found, torch.nan)
    for vertices, rows in on_ranks(workers, evaluated, run.folder, store, strategy, options):
        whole[vertices] = rows
    assert torch.equal(found, whole)
    torch.testing.assert_close(found, predict(run), rtol=1e-9, atol=1e-9)


def test_they_give_the_scores_of_the_run(run: Run, store: Path) -> None:
    """Also of a step that leaves out the rows that nobody scores; a prediction has all."""
    assert "reach" in run.records[0]["placement"][0]
    graph, classes = weft.load(str(store)), weft.predict(run, what="classes")
    assert torch.equal(classes, weft.predict(run).argmax(1))
    for split in ("train", "val"):
        chosen = graph.labelled(split)
        assert chosen is not None
        right = (classes[chosen] == graph.y[chosen]).double().mean()  # type: ignore[index]
        assert float(right) == pytest.approx(run.summary[f"{split}_accuracy"], rel=1e-12)
    assert weft.predict(run).isfinite().all()


@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("tensor", 2), ("communicated", 2), ("offload", 2)])
@pytest.mark.parametrize("layer", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_embeddings_are_what_a_hook_sees(strategy: str, workers: int, layer: int, run: Run, store: Path) -> None:
    found = predict(run.folder, workers=workers, strategy=strategy, what="embeddings", layer=layer)
    torch.testing.assert_close(found, hooked(run, weft.load(str(store)), layer), rtol=1e-9, atol=1e-9)
    if layer == 2:
        assert torch.equal(found, predict(run.folder, workers=workers, strategy=strategy, what="embeddings"))


def hooked(run: Run, graph: Graph, layer: int) -> Tensor:
    """The rows behind a layer, as a forward hook on it sees them on one device."""
    model, seen = weft.load_model(run.folder), []
    assert isinstance(model, Stack)
    model.layers[layer - 1].register_forward_hook(lambda *call: seen.append(call[-1]))
    work = Workload(model, graph, Optimisations.without("reach"))
    placed = get_strategy("single")(work).place(Group())
    placed.forward(placed.evaluation(0))
    rows: Tensor = seen[-1]  # after those of the outline
    return rows


@pytest.mark.parametrize("strategy", ["split", "sampled", "stale"])
def test_strategies_whose_evaluation_is_anothers(strategy: str, store: Path, tmp_path: Path) -> None:
    """They predict as that does: also where no vertex has a label, of which batches could be made."""
    run = train(str(store), "sage", out=tmp_path / "run", strategy=strategy, **OPTIONS)
    grown(weft.load(str(store))).save(tmp_path / "more")
    for graph in (None, tmp_path / "more"):
        found, wanted = predict(run.folder, graph, workers=2), predict(run.folder, graph, strategy="single")
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_rows_stand_by_original_ids(run: Run, store: Path, tmp_path: Path) -> None:
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
    """With three more vertices, without labels, that read of the others, and are read by none."""
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
    found = predict(run, more)
    assert found.shape == (153, 5)
    torch.testing.assert_close(found[:150], predict(run), rtol=1e-9, atol=1e-9)
    assert len(found[150:].unique(dim=0)) == 3
    more.save(tmp_path / "more")
    assert main(["predict", str(run.folder), str(tmp_path / "more"), "--out", str(tmp_path / "rows.npy")]) == 0
    assert np.array_equal(np.load(tmp_path / "rows.npy"), found.numpy())
    for workers, strategy in ((2, "tensor"), (2, "offload")):
        other = predict(run.folder, tmp_path / "more", workers=workers, strategy=strategy)
        torch.testing.assert_close(other, found, rtol=1e-9, atol=1e-9)


def test_typed_vertices(tmp_path: Path) -> None:
    from tests.lib.graphs import make_typed_graph

    graph = make_typed_graph(23, "some")
    run = train(graph, "rgcn", out=tmp_path / "run", **OPTIONS)
    assert any(isinstance(module, Embedding) for module in run.model.modules())
    graph.save(tmp_path / "graph")
    found = predict(run, graph)
    assert torch.equal(found.argmax(1), predict(run, tmp_path / "graph", what="classes"))
    for strategy in ("hybrid", "offload"):
        other = predict(run.folder, tmp_path / "graph", workers=2, strategy=strategy)
        torch.testing.assert_close(other, found, rtol=1e-9, atol=1e-9)
    with pytest.raises(weft.InputError, match="vertices without features, and the run's graph had 8"):
        predict(run, make_typed_graph(26, "some"))


def test_several_labels(tmp_path: Path) -> None:
    graph = make_graph(40, multilabel=True)
    run = train(graph, out=tmp_path / "run", **OPTIONS)
    found = predict(run, graph, what="classes")
    assert found.dtype == torch.bool
    assert torch.equal(found, predict(run, graph) > 0)


@pytest.mark.parametrize("inverse", [False, True])
def test_rows_of_a_link_model(inverse: bool, tmp_path: Path, store: Path) -> None:
    from tests.lib.graphs import make_typed_graph

    graph = make_typed_graph(30, "none") if inverse else weft.load(str(store))
    graph.save(tmp_path / "graph")
    options = OPTIONS | {"task": "link", "hidden": 6, "inverse_relations": inverse, "decoder": "distmult"}
    run = train(str(tmp_path / "graph"), "sage", out=tmp_path / "run", **options)
    found = predict(run, what="embeddings")
    assert found.shape == (graph.num_vertices, 6)
    other = predict(run.folder, what="embeddings", workers=2, strategy="tensor")
    torch.testing.assert_close(other, found, rtol=1e-9, atol=1e-9)
    assert torch.equal(found, predict(run, what="embeddings", layer=3))
    assert predict(run, tmp_path / "graph", what="embeddings").shape == found.shape
    assert isinstance(run.model, weft.nn.LinkModel)
    with pytest.raises(weft.InputError, match="a link prediction model has no classes"):
        predict(run)


class Own(Stack):
    """A model of one's own, by its constructor."""

    def __init__(self, hidden: int) -> None:
        super().__init__([SAGEConv(7, hidden), SAGEConv(hidden, 5)])


class Wrapped(nn.Module):
    """A model of one's own."""

    num_stages = 2

    def __init__(self) -> None:
        super().__init__()
        self.inner = Own(8)

    def forward(self, views: Any, x: Tensor) -> Tensor:
        y: Tensor = self.inner(views, x)
        return 2 * y


def test_a_model_of_ones_own(store: Path, tmp_path: Path) -> None:
    options = {"epochs": 2, "quiet": True}
    run = train(str(store), Own(8).double(), out=tmp_path / "run", **options)
    with pytest.raises(
        weft.InputError, match=r"its model is a .*\.Own, a custom class that weft does not import by itself: create one"
    ):
        _ = run.model
    with pytest.raises(weft.InputError, match="contains the weights of another model"):
        weft.load_model(run.folder, Own(9).double())
    with pytest.raises(weft.InputError, match="was trained in float64: convert the model"):
        weft.load_model(run.folder, Own(8))
    found = predict(run, model=Own(8).double())
    other = predict(run.folder, workers=2, strategy="tensor", model=Own(8).double())
    torch.testing.assert_close(other, found, rtol=1e-9, atol=1e-9)
    assert predict(run, model=Own(8).double(), what="embeddings").shape == (150, 8)
    wrapped = train(str(store), Wrapped().double(), out=tmp_path / "wrapped", **options)
    assert predict(wrapped, model=Wrapped().double()).shape == (150, 5)
    with pytest.raises(weft.InputError, match="cannot find the layers of a Wrapped"):
        predict(wrapped, model=Wrapped().double(), what="embeddings")


def test_a_run_that_was_stopped(run: Run, store: Path, tmp_path: Path) -> None:
    """Its newest checkpoint has the best weights so far."""
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
    found = predict(run, out=tmp_path / "rows.npy")
    assert np.load(tmp_path / "rows.npy").dtype == np.float64
    assert np.array_equal(np.load(tmp_path / "rows.npy"), found.numpy())
    predict(run, out=tmp_path / "rows.safetensors")
    assert torch.equal(load_file(tmp_path / "rows.safetensors")["logits"], found)
    predict(run, out=tmp_path / "classes.npy", what="classes")
    assert np.array_equal(np.load(tmp_path / "classes.npy"), found.argmax(1).numpy())
    assert os.stat(tmp_path / "rows.npy").st_mode == os.stat(run.folder / "config.toml").st_mode
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(weft.InputError, match=r"rows.parquet: needs pyarrow: pip install 'weft\[tables\]'"):
        predict(run, out=tmp_path / "rows.parquet")
    assert {path.name for path in tmp_path.iterdir()} == {"rows.npy", "rows.safetensors", "classes.npy"}


def test_parquet(run: Run, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    found = predict(run, out=tmp_path / "rows.parquet")
    table = parquet.read_table(tmp_path / "rows.parquet")
    assert table.column_names == [f"logit_{number}" for number in range(5)]
    assert np.array_equal(np.stack([column.to_numpy() for column in table.columns], 1), found.numpy())
    predict(run, out=tmp_path / "classes.parquet", what="classes")
    assert parquet.read_table(tmp_path / "classes.parquet")["class"].to_pylist() == found.argmax(1).tolist()


MISTAKES: list[tuple[list[str], str]] = [
    (["--out", "rows.csv"], "unknown format of --out '.csv'"),
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


@pytest.mark.parametrize(("arguments", "said"), MISTAKES)
def test_mistakes(
    arguments: list[str],
    said: str,
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.npy").write_text("kept")
    assert said in mistake(capsys, "predict", run.folder, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["there.npy"]
    assert Path("there.npy").read_text() == "kept"


def test_overwriting(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "there.npy"
    path.write_text("gone")
    assert main(["predict", str(run.folder), "--out", str(path), "--overwrite"]) == 0
    assert np.array_equal(np.load(path), predict(run).numpy())
    assert capsys.readouterr().out == f"logits [150, 5] in {path}\n"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: cut(folder / "model.safetensors"), "model.safetensors: cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: (folder / "config.toml").unlink(), "contains no run"),
        (lambda folder: (folder / "metrics.jsonl").unlink(), "does not say how its model is made"),
    ],
)
def test_damaged_folders(
    damage: Callable[[Path], Any], said: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(str(store), out=tmp_path / "run", **OPTIONS)
    damage(tmp_path / "run")
    assert said in mistake(capsys, "predict", tmp_path / "run", "--out", tmp_path / "rows.npy")
    assert not (tmp_path / "rows.npy").exists()


def test_the_runs_graph_is_another_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_graph(40).save(tmp_path / "graph")
    train(str(tmp_path / "graph"), out=tmp_path / "run", **OPTIONS)
    make_graph(41).save(tmp_path / "graph", overwrite=True)
    said = mistake(capsys, "predict", tmp_path / "run", "--out", tmp_path / "rows.npy")
    assert "have changed since" in said
    train(make_graph(40), out=tmp_path / "other", **OPTIONS)
    said = mistake(capsys, "predict", tmp_path / "other", "--out", tmp_path / "rows.npy")
    assert "was trained on a graph from a script" in said


def test_a_decoupled_model_has_no_layers_to_tell_apart(store: Path, tmp_path: Path) -> None:
    run = train(str(store), out=tmp_path / "run", decoupled=True, **OPTIONS)
    assert predict(run).shape == (150, 5)
    with pytest.raises(weft.InputError, match="cannot find the layers of a Decoupled"):
        predict(run, what="embeddings")


def test_a_command_on_ranks(run: Run, tmp_path: Path) -> None:
    """Of torchrun's ranks rank 0 says so, and names the file."""
    path = tmp_path / "rows.npy"
    said = command("predict", run.folder, "--strategy", "tensor", "--out", path, workers=2)
    assert (said.result, said.err) == (0, "")
    assert said.out == f"logits [150, 5] in {path}\n"
    torch.testing.assert_close(torch.from_numpy(np.load(path)), predict(run), rtol=1e-9, atol=1e-9)
    assert [one.name for one in tmp_path.iterdir()] == ["rows.npy"]


def predicted_on_hosts(group: Group, run: Path, out: Path, given: dict[str, Any]) -> Tensor:
    """Rows on a rank, where all but two are on other hosts than rank 0, which have no folder for the file."""
    os.environ["LOCAL_RANK"] = str(group.rank if group.rank < 2 else group.rank - 2)
    try:
        path = out if group.rank < 2 else out.parent / "nowhere" / out.name
        return weft.predict(run, out=path, **given).clone()
    finally:
        os.environ["LOCAL_RANK"] = os.environ["RANK"]


@pytest.mark.parametrize("what", ["logits", "classes"])
def test_hosts_send_their_rows(what: str, run: Run, tmp_path: Path) -> None:
    """In several blocks; the file is written on rank 0's host alone."""
    given = {"what": what, "strategy": "communicated", "partition": "random"}
    found = on_ranks(4, in_small_blocks, run.folder, tmp_path / "rows.npy", given)
    wanted = weft.predict(run, what=what)
    for rows in (*found[:2], torch.from_numpy(np.load(tmp_path / "rows.npy"))):
        torch.testing.assert_close(rows, wanted, rtol=1e-9, atol=1e-9)
    for rows in found[2:]:
        assert rows.shape == (0, *wanted.shape[1:])
    assert [one.name for one in tmp_path.iterdir()] == ["rows.npy"]


def test_rows_that_are_not_sent_would_be_seen(run: Run, tmp_path: Path) -> None:
    given = {"strategy": "communicated", "partition": "random"}
    on_ranks(4, without_sending, run.folder, tmp_path / "rows.npy", given)
    assert not np.allclose(np.load(tmp_path / "rows.npy"), weft.predict(run).numpy(), atol=1e-9)


def without_sending(group: Group, *arguments: Any) -> Tensor:
    """`predicted_on_hosts`, as if all ranks were of one host."""
    right, prediction.RowsOfRank._send_to_rank_0 = prediction.RowsOfRank._send_to_rank_0, lambda *_: None  # type: ignore[method-assign]
    try:
        return predicted_on_hosts(group, *arguments)
    finally:
        prediction.RowsOfRank._send_to_rank_0 = right  # type: ignore[method-assign]


def test_what_is_true_or_not_is_sent() -> None:
    """As classes of several labels are."""
    for rows in on_ranks(2, sent_to_rank_0)[:1]:
        assert rows.tolist() == [[True, False], [True, False], [False, True]]


def sent_to_rank_0(group: Group) -> Tensor:
    rows = torch.tensor([[True, False]]) if group.rank == 0 else torch.tensor([[True, False], [False, True]])
    return prediction.gather_on_rank_0(group, rows, [1, 2])


def in_small_blocks(group: Group, *arguments: Any) -> Tensor:
    """`predicted_on_hosts` in blocks of three rows."""
    right, row_batching.BLOCK_BYTES = row_batching.BLOCK_BYTES, 3 * 5 * 8
    try:
        return predicted_on_hosts(group, *arguments)
    finally:
        row_batching.BLOCK_BYTES = right


@pytest.mark.slow
def test_two_hosts_of_torchrun(run: Run, tmp_path: Path) -> None:
    """Emulated by one torchrun for each; both write to a folder of their own, of which one stays empty."""
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


def hold() -> None:
    """In the command's process, and the ranks forked from it: rows do not come into the file."""
    TableFile.put = lambda *_: time.sleep(100)  # type: ignore[assignment, method-assign, return-value]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_signal(workers: int, number: signal.Signals, run: Run, tmp_path: Path) -> None:
    """What is told to stop leaves nothing; what is killed, no file of the name, and nobody."""
    path = tmp_path / "rows.npy"
    options = ("--strategy", "offload", "--workers", str(workers), "--out", path)
    process = start("predict", run.folder, *options, prepare=hold)
    deadline = time.monotonic() + 60
    while not (drafts := list(tmp_path.iterdir())):
        assert time.monotonic() < deadline
        assert process.returncode is None
        time.sleep(0.05)
    assert [one.name for one in drafts] == [f".rows.npy.{process.pid}.tmp"]
    time.sleep(0.5)
    os.kill(process.pid, number)
    code, errors = finish(process)
    if number == signal.SIGKILL:
        assert code == -number
        assert not path.exists()
        return
    assert code == 128 + number
    assert errors.startswith("weft: stopped by SIGTERM")
    assert list(tmp_path.iterdir()) == []


def test_launched_ranks(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    code, errors = finish(start("predict", run.folder, "--strategy", "tensor", "--workers", "2", "--out", path))
    assert (code, errors) == (0, "")
    torch.testing.assert_close(torch.from_numpy(np.load(path)), predict(run), rtol=1e-9, atol=1e-9)
    assert [one.name for one in tmp_path.iterdir()] == ["rows.npy"]


def test_a_full_disk_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert main(["predict", str(run.folder), "--out", str(tmp_path / "rows.npy")]) == 1
    (line,) = complaints(capsys.readouterr().err)
    assert line.endswith("No space left on device: choose a folder with enough space for --out")
    assert list(tmp_path.iterdir()) == []


def test_rows_that_a_step_leaves_out_would_be_seen(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a prediction were an evaluation, which scores few rows."""
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
    """By all tensors that are made, the loader's too, on a real graph; what cannot is refused before."""
    store, limit, seen = tmp_path / "graph", parse_bytes("8MB", "--device-memory"), list[int]()
    weft.load(str(weft_data("tolokers"))).save(store)
    trained = train(str(store), model, out=tmp_path / "run", epochs=1, hidden=128, quiet=True)
    forward = PlacedOffload.forward

    def watched(placed: PlacedOffload, step: Any) -> Tensor:
        if placed.estimate is None:  # the chunk scaled down, by which a plan finds what one takes
            return forward(placed, step)
        forward(placed, step)  # what is made once is the host's
        peak = TensorPeak()
        placed.chunks.__dict__["_loader"] = ThreadPoolExecutor(1, initializer=peak.__enter__)
        with peak:
            rows = forward(placed, step)
        seen.append(peak.most)
        return rows

    monkeypatch.setattr(PlacedOffload, "forward", watched)
    found = predict(trained, strategy="offload", device_memory="8MB")
    torch.testing.assert_close(found, predict(trained), rtol=1e-3, atol=1e-4)
    predict(trained, strategy="offload", device_memory="256MB")
    within, without = seen
    assert limit / 8 < within <= limit < without
    monkeypatch.setattr(OffloadPlan, "place", lambda *_, **__: pytest.fail("placed"))
    with pytest.raises(weft.InputError, match=r"^--device-memory 50\.0 kB: one vertex .* give --device-memory"):
        predict(trained, strategy="offload", device_memory="50kB", out=tmp_path / "rows.npy")
    assert not (tmp_path / "rows.npy").exists()
