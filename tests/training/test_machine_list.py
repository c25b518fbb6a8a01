"""`weft plan --machines`, and plans for graphs described by statistics only."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest

import weft
from tests.lib.graph_checks import assert_one_line
from tests.lib.profiles import profile
from weft.cli.main import main
from weft.config.config import Config
from weft.data import DescribedGraph, load
from weft.runtime.kernel_call import KernelCall
from weft.training.planning import probe_command
from weft.training.planning.machine_list import Machines, clusters_on, machines_of
from weft.training.planning.plan_call import Where, planned, subject_of
from weft.training.planning.plan_subject import MAX_EDGES, MAX_RANKS, DescribedSubject
from weft.training.planning.search import StrategyEstimate, estimate_config, estimate_strategies
from weft.utils.errors import InputError

PAPERS = "stats:vertices=111m,edges=1.6b,features=128,classes=172"
TINY = "rmat:vertices=300,edges=3k,features=16,classes=4"
SMALL = "stats:vertices=2000,edges=20k,features=16,classes=4"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save a profile where the user's is searched for; return its path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe_command, "hardware", lambda: {"processor": "none", "cores": 2})
    path = tmp_path / "cache" / "weft" / "machine.json"
    profile().save(path)
    return path


def rows(graph: str, machines: str, **options: object) -> dict[tuple[str, str], StrategyEstimate]:
    """Return the best estimate of each strategy, by machines and strategy."""
    estimates = weft.plan(graph, machines=machines, **options)  # type: ignore[arg-type]
    return {(estimate.machines, estimate.strategy): estimate for estimate in reversed(estimates)}


def test_a_list_and_a_file_describe_equal_machines(tmp_path: Path) -> None:
    expected = machines_of("1x24GB, 4x24GB@1gbit,8xT4@15gbit,4xa100,2x8xRTX 3090@100gbit")
    assert expected == [
        Machines(memory="24GB"),
        Machines(hosts=4, memory="24GB", network="1gbit"),
        Machines(hosts=8, gpu="T4", network="15gbit"),
        Machines(gpu="A100", gpus=4),
        Machines(hosts=2, gpu="RTX3090", gpus=8, network="100gbit"),
    ]
    path = tmp_path / "cluster.toml"
    path.write_text(
        '[[machines]]\nmemory = "24GB"\n[[machines]]\nhosts = 4\nmemory = "24GB"\nnetwork = "1gbit"\n'
        '[[machines]]\nhosts = 8\ngpu = "T4"\nnetwork = "15gbit"\n[[machines]]\ngpu = "A100"\ngpus = 4\n'
        '[[machines]]\nhosts = 2\ngpu = "RTX3090"\ngpus = 8\nnetwork = "100gbit"\n'
    )
    assert machines_of(str(path)) == expected
    assert machines_of(",".join(map(str, expected))) == expected


@pytest.mark.parametrize(
    ("machines", "reason"),
    [
        ("4xFOO@1gbit", "unknown GPU of --machines 'FOO'"),
        ("4xA10O@1gbit", "did you mean 'A10'"),
        ("1x0GB", "the memory must be more than 0"),
        ("0xT4", "must be at least 1"),
        ("4x24GB", "several hosts need a network: write 4x24GB@10gbit"),
        ("4xT4@fast", "give a rate such as 10gbit"),
        ("4xT4@0gbit", "give a rate such as 10gbit"),
        ("T4", "write COUNTxMEMORY or COUNTxGPU"),
        ("2x3x24GB@1gbit", "3x needs the name of a GPU"),
        ("1x24QB", "give an amount such as 512MB"),
        ("4x @10gbit", "write COUNTxMEMORY or COUNTxGPU"),
        ("none.toml", "No such file"),
    ],
)
def test_nonsense_is_one_line(machines: str, reason: str) -> None:
    with pytest.raises(InputError) as error:
        weft.plan("digits", machines=machines)
    assert_one_line(error, reason)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no table [[machines]]"),
        ('[[machines]]\ngpus = "4"\n', "gpus = '4'"),
        ('[[machines]]\nname = "a"\n', "unknown key of [[machines]] 'name'"),
        ("[[machines]]\nhosts = 1\n", "neither memory nor gpu"),
        ("[[machines", "TOML"),
        ("machines = [1, 2]", "no table [[machines]]"),
        ('[[machines]]\nmemory = "24GB"\ngpus = 4\n', "gpus = 4 has no effect without gpu"),
    ],
)
def test_a_bad_file_is_one_line(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        machines_of(str(path))
    assert_one_line(error, reason)


def test_rows_for_each_alternative(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TINY, "--machines", "1x24GB,2x24GB@1gbit,2xT4@15gbit", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert {row["machines"] for row in output["plans"]} == {"1x24GB", "2x24GB@1gbit", "2xT4@15gbit"}
    assert {row["workers"] for row in output["plans"] if row["machines"] == "2xT4@15gbit"} == {2}
    assert {row["workers"] for row in output["plans"] if row["machines"] == "2x24GB@1gbit"} == {2, 4}
    notes = " ".join(output["notes"])
    assert "2xT4@15gbit: nominal, not measured: kernels, links and memory from the datasheet (NVIDIA T4)" in notes
    assert "2x24GB@1gbit: nominal, not measured: the network 1gbit" in notes
    assert "1x24GB:" not in notes
    for row in output["plans"]:
        assert ("--device cuda" in row["command"]) == ("T4" in row["machines"])
    assert main(["plan", TINY, "--machines", "2xT4"]) == 0
    assert "nominal, not measured" in capsys.readouterr().out


def test_more_of_anything_is_never_slower() -> None:
    """More machines of better hardware have a smaller estimate; no exact prices are needed to check this."""
    estimates = rows(SMALL, "4xT4@1gbit,4xT4@10gbit,4xA100@10gbit,4xA100")
    for strategy in ("tensor", "communicated", "cached"):
        ordered = [
            estimates[machines, strategy] for machines in ("4xT4@1gbit", "4xT4@10gbit", "4xA100@10gbit", "4xA100")
        ]
        seconds = [estimate.epoch_seconds for estimate in ordered]
        assert seconds == sorted(seconds, reverse=True), strategy
        assert ordered[0].network_seconds > ordered[1].network_seconds
        assert ordered[0].compute_seconds == pytest.approx(ordered[1].compute_seconds)


@pytest.mark.slow
def test_memory_decides_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.training.planning.plan_subject.MAX_VERTICES", 1 << 11)
    estimates = rows(PAPERS, "3xT4@10gbit")
    whole = estimates["3xT4@10gbit", "communicated"]
    assert not whole.fits
    assert "16.64 GB available" in whole.reason
    chunked = estimates["3xT4@10gbit", "offload"]
    assert chunked.options["chunks"] > 1
    assert chunked.device_bytes < 17.2e9
    assert chunked.host_bytes > whole.host_bytes
    assert not any(estimate.fits for estimate in rows(SMALL, "2x1MB@1gbit").values())


def test_prices_follow_the_datasheets() -> None:
    """Large operations cost what the datasheet's rates imply, because fixed costs are negligible."""
    alone, shared = clusters_on(machines_of("4xT4@10gbit,2x8xA100@100gbit"), Config(), None)
    (prices,), (network,), (others,) = alone.profile.prices, alone.profile.networks, shared.profile.networks
    assert network.seconds("halo", 10**10) == pytest.approx(10**10 / (0.85 * 10e9 / 8), rel=1e-3)
    assert others.seconds("halo", 10**10) == pytest.approx(10**10 / (0.85 * 100e9 / 8 / 8), rel=1e-3)
    assert prices.seconds(KernelCall("pass", (10**9,))) == pytest.approx(10**9 / (0.8 * 320e9), rel=1e-2)
    rows, width = 1 << 20, 1024
    flops = 2 * rows * width * width
    assert prices.seconds(KernelCall("linear", (rows, width, width))) == pytest.approx(flops / (0.7 * 8.1e12), rel=1e-2)


def test_training_vertices_are_of_all_degrees() -> None:
    """Training vertices have the same share of the edges in generated graphs of every size."""
    described = DescribedGraph.parse(PAPERS + ",train=0.01")
    for halvings in (12, 13, 14):
        graph = described.generate(halvings)
        assert graph.train_mask is not None
        read = int(graph.in_edges.degree[graph.train_mask].sum())
        assert read / graph.num_edges == pytest.approx(0.0095, abs=0.001), halvings


def test_offloaded_rows_are_copied_over_the_host_link() -> None:
    estimates = rows(SMALL, "1xT4")
    clusters = clusters_on(machines_of("1xT4"), Config(), None)
    (prices,) = clusters[0].profile.prices
    assert prices.link_seconds == pytest.approx(1 / (0.8 * 15.75e9))
    assert estimates["1xT4", "offload"].compute_seconds > estimates["1xT4", "single"].compute_seconds


def test_workers_that_do_not_fit_the_machines_are_refused() -> None:
    with pytest.raises(InputError, match="has one rank for each GPU: leave --workers 3 out"):
        weft.plan("digits", machines="2xT4", workers=3)
    with pytest.raises(InputError, match="--workers 3 must be a multiple of the 2 hosts"):
        weft.plan("digits", machines="2x24GB@1gbit", workers=3)
    with pytest.raises(InputError, match="--hosts has no effect with --machines"):
        weft.plan("digits", machines="2xT4", hosts=2)
    with pytest.raises(InputError, match="--machine has no effect if all --machines have GPUs"):
        weft.plan("digits", machines="2xT4", machine="other.json")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("stats:vertices=0,edges=0,features=1,classes=2", "at least 1"),
        ("stats:vertices=10,edges=101,features=1,classes=2", "10 vertices have at most 100"),
        ("stats:vertices=10,edges=20,features=0,classes=2", "at least 1"),
        ("stats:vertices=10,edges=20,features=1,classes=2,train=1.5", "train=1.5"),
        ("stats:vertices=10,edges=20,features=1,classes=2,train=0", "train=0"),
        ("stats:vertices=10,edges=20,features=1,classes=2,rmat=0.9/0.9/0", "rmat=0.9/0.9/0"),
        ("stats:vertices=10,edges=20,features=1,classes=2,rmat=0/0/0", "the first at least 0.1"),
        ("stats:vertices=10,edges=20,features=1,classes=2,rmat=nan/0/0", "rmat=nan/0/0"),
        ("stats:vertices=10", "'edges' is missing"),
        ("stats:vertices=10,edges=20,features=1,classes=2,skew=1", "unknown stats key 'skew'"),
        ("stats:", "no number"),
    ],
)
def test_impossible_graph_statistics_are_refused(spec: str, reason: str) -> None:
    with pytest.raises(InputError) as error:
        weft.plan(spec, machines="1xT4")
    assert_one_line(error, reason)


def test_a_described_graph_cannot_be_trained() -> None:
    with pytest.raises(InputError) as error:
        load(PAPERS)
    assert_one_line(error, "which only weft plan can use")


def test_generated_graphs_have_the_mean_degree() -> None:
    described = DescribedGraph.parse(PAPERS + ",train=0.01,rmat=0.45/0.22/0.22")
    for halvings in (12, 14):
        graph = described.generate(halvings)
        assert graph.num_edges / graph.num_vertices == pytest.approx(1.6e9 / 111e6, rel=1e-3)
        assert graph.num_features, graph.num_classes == (128, 172)
        assert graph.train_mask is not None
        assert float(graph.train_mask.float().mean()) == pytest.approx(0.01, rel=0.1)
    skewed = DescribedGraph.parse(PAPERS).generate(12)
    assert skewed.in_edges.degree.max() > 2 * described.generate(12).in_edges.degree.max()


def test_a_small_described_graph_is_not_extrapolated() -> None:
    """Estimates equal those for a generated R-MAT graph of the same size."""
    graph = DescribedGraph.parse(SMALL).generate(0)
    clusters = clusters_on(machines_of("2xT4@10gbit"), Config(), None)
    config = Config(graph=SMALL, workers=1)
    expected = estimate_strategies(config, subject_of(config, graph, None), clusters)
    estimates, values = planned(config, None, None, Where(machines="2xT4@10gbit"), approximate=False)
    seconds = {estimate.strategy: estimate.epoch_seconds for estimate in expected}
    assert {estimate.strategy: estimate.epoch_seconds for estimate in estimates} == pytest.approx(seconds)
    assert values["fingerprint"] == ""
    assert not any("extrapolated" in note for note in values["notes"])
    assert all("weft train GRAPH " in estimate.command for estimate in estimates)


@pytest.mark.slow
def test_extrapolated_estimates_are_close_to_those_of_the_large_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extrapolation is accurate to 8 times as many vertices and 2 times as many ranks as were traced."""
    config = Config(graph="stats:vertices=32k,edges=320k,features=32,classes=8")
    clusters = clusters_on(machines_of("4xT4@10gbit,16xT4@10gbit"), Config(), None)
    requests = [
        (replace(config, strategy=strategy, workers=cluster.ranks), cluster)
        for strategy in ("communicated", "tensor", "cached")
        for cluster in clusters
    ]
    whole, small = subject_of(config, None, None), subject_of(config, None, None)
    assert isinstance(small, DescribedSubject)
    exact = [estimate_config(request, config, whole, cluster) for request, cluster in requests]
    monkeypatch.setattr("weft.training.planning.plan_subject.MAX_VERTICES", 4000)
    monkeypatch.setattr("weft.training.planning.plan_subject.MAX_RANKS", 8)
    assert small.size_ratio(4) == 8
    for (request, cluster), expected in zip(requests, exact, strict=True):
        estimate = estimate_config(request, config, small, cluster)
        for name in ("sent_bytes", "device_bytes", "epoch_seconds"):
            max_ratio = 1.15 if request.workers == 4 else 1.4
            ratio = getattr(estimate, name) / getattr(expected, name)
            assert 1 / max_ratio < ratio < max_ratio, (request.strategy, request.workers, name)
    assert "2 times from 2, 4 and 8 ranks" in small.explain(16)


@pytest.mark.slow
def test_hybrid_is_estimated_no_slower_than_its_alternatives() -> None:
    """Extrapolation holds for hybrid, which caches nearly all vertices of small graphs, but fewer of larger ones."""
    disabled = "reach,reuse,sparse,swap,cover"
    config = Config(graph="stats:vertices=42m,edges=1.5b,features=52,classes=16", hidden=32, disable=disabled)
    (cluster,) = clusters_on(machines_of("16xT4@6gbit"), Config(), None)
    subject = subject_of(config, None, None)
    hybrid, cached, communicated = (
        estimate_config(replace(config, strategy=strategy, workers=16), config, subject, cluster)
        for strategy in ("hybrid", "cached", "communicated")
    )
    assert hybrid.sent_bytes < communicated.sent_bytes
    assert hybrid.epoch_seconds < 1.1 * min(cached.epoch_seconds, communicated.epoch_seconds)


@pytest.mark.slow
def test_planning_for_a_large_graph_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated graphs and traced plans stay below `MAX_EDGES` and `MAX_RANKS`."""
    subject = subject_of(Config(graph=PAPERS), None, None)
    assert isinstance(subject, DescribedSubject)
    for ranks in (1, 4, 16, 256):
        points = [*subject.by_vertices(ranks), *subject.fewer_ranks(ranks)]
        assert max(point.planned.work.stats.num_edges for point in points) <= MAX_EDGES
        assert max(point.ranks for point in points) <= MAX_RANKS
        # Chunk sizes are computed once for each model.
        assert len({id(point.planned.work.model) for point in points}) == 1
    monkeypatch.setattr("weft.training.planning.plan_subject.MAX_VERTICES", 1 << 11)
    estimates = rows(PAPERS, "256xA100@100gbit")
    assert estimates["256xA100@100gbit", "tensor"].fits
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20  # including the memory of the tests themselves
