"""Training of unchanged PyG models with `weft.train`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import weft
from tests.lib.session import Flops
from weft.cli.main import main
from weft.comm import Group
from weft.config.config import Config
from weft.runtime.memory.tensor_peak import TensorPeak
from weft.strategies.base import Options
from weft.strategies.single import SinglePlan
from weft.training.run import prepared_workload
from weft.utils.errors import InputError

pyg = pytest.importorskip("torch_geometric.nn")

OPTIONS: dict[str, Any] = {"epochs": 4, "quiet": True, "dtype": "float64"}


class Net(nn.Module):
    def __init__(self, dropout: bool = True) -> None:
        super().__init__()
        self.conv1, self.conv2 = pyg.SAGEConv(64, 16), pyg.SAGEConv(16, 10)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.5 if dropout else 0.0)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.dropout(self.norm(self.conv1(x, edge_index)).relu()), edge_index)


class Noisy(Net):
    """Model with random noise that weft cannot repeat."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(torch.nn.functional.rrelu(-x, training=True), edge_index)


def net(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize("strategy", ["tensor", "hybrid", pytest.param("split", marks=pytest.mark.slow)])
def test_trains_as_it_is_on_several_ranks(strategy: str, tmp_path: Path) -> None:
    """Losses equal those on one rank; the module gets the best weights, and the file has them under PyG's names."""
    model, options = net(), dict(OPTIONS)
    if strategy == "split":
        options |= {"batch_size": "all", "fanout": "all"}
    run = weft.train("digits", model, strategy=strategy, workers=2, out=tmp_path / "run", **options)
    alone = weft.train("digits", net(), strategy=strategy, out=tmp_path / "alone", **options)
    pairs = zip(_losses(run), _losses(alone), strict=True)
    assert all(abs(loss - other) < 1e-9 for loss, other in pairs)
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert saved.keys() == net().state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=0)
    assert not torch.equal(model.conv1.lin_l.weight, net().conv1.lin_l.weight)


class Weighted(Net):
    """Model with edge features, and an optional argument that only its author uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = pyg.GATConv(64, 8, heads=2, edge_dim=3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, hidden_rows: bool = False) -> Any:
        h = self.norm(self.conv1(x, edge_index, edge_attr)).relu()
        y = self.conv2(self.dropout(h), edge_index)
        return (y, h) if hidden_rows else y


def test_a_trained_model_is_called_with_the_arguments_of_pyg(tmp_path: Path) -> None:
    data = weft.load("digits").to_pyg()
    data.edge_attr = torch.rand(data.num_edges, 3, generator=torch.Generator().manual_seed(0))
    data = data.apply(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    graph = weft.Graph.from_pyg(data)
    run = weft.train(graph, net(Weighted), out=tmp_path / "run", **OPTIONS)
    logits = weft.predict(run, graph)
    with torch.no_grad():
        assert_equal(run.model(data.x, data.edge_index, data.edge_attr), logits)
        y, h = run.model(data.x, data.edge_index, edge_attr=data.edge_attr, hidden_rows=True)
        assert_equal(y, logits)
        assert h.shape == (graph.num_vertices, 16)
        loaded = weft.load_model(run.folder, net(Weighted))
        assert_equal(loaded(data.x, data.edge_index, data.edge_attr), logits)
        loaded.float()  # the original's batch norm keeps buffers in float64
        assert loaded(data.x.float(), data.edge_index, data.edge_attr.float()).dtype == torch.float32
        with pytest.raises(InputError, match=r"this copy .* has no original .*: call the model that weft\.nn\.convert"):
            copy.deepcopy(loaded)(data.x, data.edge_index, data.edge_attr)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_a_run_keeps_its_module(tmp_path: Path) -> None:
    """Predictions use the trained module, with the best weights of the run even if it was trained again."""
    module = net()
    first = weft.train("digits", module, out=tmp_path / "first", **OPTIONS)
    logits = weft.predict(first, model=net())
    weft.train("digits", module, out=tmp_path / "second", **OPTIONS)
    weights = copy.deepcopy(module.state_dict())
    assert torch.equal(weft.predict(first), logits)
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    with pytest.raises(InputError, match=r"is a .*Net, a custom class that weft does not import by itself"):
        weft.predict(weft.Run.open(tmp_path / "first"))


def test_an_unconverted_model_is_called_as_it_is(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Noisy runs as it is"):
        run = weft.train("digits", net(Noisy), out=tmp_path / "run", **OPTIONS)
    with pytest.warns(UserWarning, match="Noisy runs as it is"):
        model = run.model
    data = weft.load("digits").to_pyg()
    assert model(data.x.double(), data.edge_index).shape == (data.num_nodes, 10)


def test_an_unconverted_model_is_estimated() -> None:
    """FLOPs and memory are those of a step of the model, also where PyG has a row for each edge."""
    model = net(Noisy)
    with pytest.warns(UserWarning, match="Noisy runs as it is"):
        work = prepared_workload(Config(graph="digits", model="Noisy", dtype="float64"), None, model)
    plan = SinglePlan(work, 1, Options(), None)
    placed = plan.place(Group())
    step = next(iter(placed.steps(0)))
    placed.forward(step).sum().backward()  # what the first step computes once
    with Flops() as flops, TensorPeak() as peak:
        logits = placed.forward(step)
        placed.backward(logits, torch.ones_like(logits))
    assert plan.trace(training=True).flops == flops.total > 0
    assert plan.memory() == pytest.approx(peak.most, rel=0.1)


class Own(Net):
    """Model that runs on its own graph alone."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        assert len(x) > 100
        return super().forward(torch.nn.functional.rrelu(-x, training=True), edge_index)


@pytest.mark.parametrize("kind", [Noisy, Own])
def test_only_single_is_proposed_for_an_unconverted_model(kind: type[Net]) -> None:
    with pytest.warns(UserWarning, match="runs as it is"):
        estimates = weft.plan("digits", net(kind), workers=1, memory=True)
    assert [each.strategy for each in estimates if each.fits] == ["single"]
    assert {each.reason for each in estimates if not each.fits} == {
        "only strategy single runs a model as it is, without conversion"
    }


class Jumping(Net):
    """Model that uses an attention convolution with two heads twice, with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.gat, self.out = pyg.GATConv(16, 8, heads=2), nn.Linear(16, 10)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.norm(self.conv1(x, edge_index)).relu_()
        for _ in range(2):
            h = h + self.dropout(self.gat(h, edge_index)).relu()
        return self.out(h)


@pytest.mark.parametrize(
    ("strategy", "workers", "layers", "options"),
    [
        ("single", 1, (1, 2, 3), {}),
        ("tensor", 2, (2,), {}),
        ("offload", 1, (3,), {"chunks": 3}),
        pytest.param("hybrid", 2, (1, 2, 3), {}, marks=pytest.mark.slow),
        pytest.param("offload", 2, (1, 2, 3), {"chunks": 3}, marks=pytest.mark.slow),
        pytest.param("pipeline", 2, (1, 2, 3), {"chunks": 3}, marks=pytest.mark.slow),
        pytest.param("split", 2, (2,), {}, marks=pytest.mark.slow),
    ],
)
def test_embeddings_are_what_a_hook_sees(
    strategy: str, workers: int, layers: tuple[int, ...], options: dict[str, Any], jumping: Any
) -> None:
    run, _, outputs = jumping
    assert len(outputs) == 3
    for layer in layers:
        prediction = {"what": "embeddings", "layer": layer, "strategy": strategy, "workers": workers, **options}
        embeddings = weft.predict(run, model=net(Jumping), **prediction)
        torch.testing.assert_close(embeddings, outputs[layer - 1], rtol=1e-9, atol=1e-9)


def test_embeddings_by_default_and_beyond(jumping: Any) -> None:
    """Embeddings are by default those of the last but one convolution; a layer that does not exist is refused."""
    run, _, outputs = jumping
    embeddings = weft.predict(run, model=net(Jumping), what="embeddings")
    torch.testing.assert_close(embeddings, outputs[1], rtol=1e-9, atol=1e-9)
    with pytest.raises(InputError, match="--layer 4: the model has 3 layers"):
        weft.predict(run, model=net(Jumping), what="embeddings", layer=4)


@pytest.fixture(scope="module")
def jumping(tmp_path_factory: pytest.TempPathFactory) -> tuple[weft.Run, nn.Module, list[Tensor]]:
    """Return a run, its model with the best weights, and the outputs that hooks on PyG's convolutions record."""
    model = net(Jumping)
    run = weft.train("digits", model, out=tmp_path_factory.mktemp("runs") / "run", **OPTIONS)
    graph, outputs = weft.load("digits"), list[Tensor]()

    def note(_module: nn.Module, _inputs: Any, result: Tensor) -> None:
        outputs.append(result.clone())

    hooks = [part.register_forward_hook(note) for part in (model.conv1, model.gat)]
    with torch.no_grad():
        model.eval()(graph.x.double(), torch.stack(graph.in_edges.edges()))
    for hook in hooks:
        hook.remove()
    return run, model, outputs


def test_equals_a_script_of_pyg(tmp_path: Path) -> None:
    """Losses equal those of four epochs of Adam in plain PyG, without dropout."""
    graph = weft.load("digits")
    model, reference = Net(dropout=False).double(), Net(dropout=False).double()
    reference.load_state_dict(model.state_dict())
    run = weft.train(graph, model, out=tmp_path / "run", **OPTIONS)
    x, edge_index = graph.x.double(), torch.stack(graph.in_edges.edges())
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.01, weight_decay=5e-4)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        logits = reference.train()(x, edge_index)
        loss = nn.functional.cross_entropy(logits[graph.train_mask], graph.y[graph.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(torch.tensor(_losses(run)), torch.tensor(losses), rtol=1e-9, atol=1e-9)


def test_random_noise_is_refused_on_several_ranks(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Noisy draws random numbers.*--strategy single"):
        weft.train("digits", net(Noisy), strategy="tensor", workers=2, out=tmp_path / "run", **OPTIONS)
    assert not (tmp_path / "run").exists()


def _losses(run: Any) -> list[float]:
    return [line["loss"] for line in run.records if line["kind"] == "epoch"]


SOURCE = """
import torch
import torch_geometric.nn as pyg

class Net(torch.nn.Module):
    def __init__(self, in_channels, out_channels, hidden=16):
        super().__init__()
        self.conv1, self.conv2 = pyg.GCNConv(in_channels, hidden), pyg.GCNConv(hidden, out_channels)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

def unlike(in_channels, out_channels):
    return [in_channels, out_channels]

def wanting(in_channels, out_channels, hidden):
    return Net(in_channels, out_channels, hidden)
"""


@pytest.fixture
def defined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module with `SOURCE` to the current folder and return its name."""
    monkeypatch.chdir(tmp_path)
    name = f"models_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(SOURCE)
    return name


def test_a_class_is_named_where_it_is_defined(defined: str, tmp_path: Path) -> None:
    """A class named on the command line is imported by local ranks too, and must be named again to predict."""
    words = ["train", "digits", f"--model={defined}:Net", "--epochs=3", "--dtype=float64", "--seed=5"]
    assert main([*words, "--strategy=tensor", "--workers=2", "--out=two"]) == 0
    assert main([*words, "--out=one"]) == 0
    single, two = (_losses(weft.Run.open(tmp_path / name)) for name in ("one", "two"))
    assert all(abs(a - b) < 1e-9 for a, b in zip(single, two, strict=True))
    assert f"--model={defined}:Net" in (tmp_path / "one" / "card.md").read_text()
    assert main(["predict", "one", "--out=a.npy", f"--model={defined}:Net"]) == 0
    assert main(["predict", "one", "--out=b.npy"]) == 2
    assert not (tmp_path / "b.npy").exists()
    assert main(["compare", "digits", f"--model={defined}:Net", "--strategies=single,tensor", "--epochs=1"]) == 0


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("none_such:Net", "cannot import module 'none_such'"),
        ("{}:Other", "has no 'Other': give package.module:Class"),
        ("{}:wanting", r"cannot be called as wanting\(64, 10\).*missing a required argument: 'hidden'"),
        ("{}:unlike", "returns a list: give a class or function that returns a torch.nn.Module"),
        (":Net", "cannot import module ''"),
    ],
)
def test_a_name_that_makes_no_model(name: str, error: str, defined: str) -> None:
    with pytest.raises(InputError, match=error):
        weft.train("digits", name.format(defined), epochs=1, quiet=True)


def test_options_of_weft_families_are_refused_for_it(defined: str) -> None:
    with pytest.raises(InputError, match="hidden has no effect on a custom model"):
        weft.train("digits", f"{defined}:Net", hidden=8, epochs=1, quiet=True)
