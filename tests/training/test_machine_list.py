"""`weft plan --machines` and graphs of which only numbers are known."""

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
    """A profile where the user's is looked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe_command, "hardware", lambda: {"processor": "none", "cores": 2})
    path = tmp_path / "cache" / "weft" / "machine.json"
    profile().save(path)
    return path


def rows(graph: str, machines: str, **options: object) -> dict[tuple[str, str], StrategyEstimate]:
    """The first row of each strategy on each of some machines."""
    found = weft.plan(graph, machines=machines, **options)  # type: ignore[arg-type]
    return {(one.machines, one.strategy): one for one in reversed(found)}


def test_lines_and_files_say_the_same(tmp_path: Path) -> None:
    said = machines_of("1x24GB, 4x24GB@1gbit,8xT4@15gbit,4xa100,2x8xRTX 3090@100gbit")
    assert said == [
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
    assert machines_of(str(path)) == said
    assert machines_of(",".join(map(str, said))) == said


@pytest.mark.parametrize(
    ("said", "reason"),
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
def test_nonsense_is_one_line(said: str, reason: str) -> None:
    with pytest.raises(InputError) as error:
        weft.plan("digits", machines=said)
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
    told = json.loads(capsys.readouterr().out)
    assert {one["machines"] for one in told["plans"]} == {"1x24GB", "2x24GB@1gbit", "2xT4@15gbit"}
    assert {one["workers"] for one in told["plans"] if one["machines"] == "2xT4@15gbit"} == {2}
    assert {one["workers"] for one in told["plans"] if one["machines"] == "2x24GB@1gbit"} == {2, 4}
    said = " ".join(told["notes"])
    assert "2xT4@15gbit: nominal, not measured: kernels, links and memory from the datasheet (NVIDIA T4)" in said
    assert "2x24GB@1gbit: nominal, not measured: the network 1gbit" in said
    assert "1x24GB:" not in said
    for one in told["plans"]:
        assert ("--device cuda" in one["command"]) == ("T4" in one["machines"])
    assert main(["plan", TINY, "--machines", "2xT4"]) == 0
    assert "nominal, not measured" in capsys.readouterr().out


def test_more_of_anything_is_never_slower() -> None:
    """By inequalities, which no price has to be known for."""
    found = rows(SMALL, "4xT4@1gbit,4xT4@10gbit,4xA100@10gbit,4xA100")
    for strategy in ("tensor", "communicated", "cached"):
        told = [found[where, strategy] for where in ("4xT4@1gbit", "4xT4@10gbit", "4xA100@10gbit", "4xA100")]
        seconds = [one.epoch_seconds for one in told]
        assert seconds == sorted(seconds, reverse=True), strategy
        assert told[0].network_seconds > told[1].network_seconds
        assert told[0].compute_seconds == pytest.approx(told[1].compute_seconds)


@pytest.mark.slow
def test_memory_decides_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.training.planning.plan_subject.MAX_VERTICES", 1 << 11)
    found = rows(PAPERS, "4xT4@10gbit")
    whole = found["4xT4@10gbit", "communicated"]
    assert not whole.fits
    assert "of a device's 16.64 GB" in whole.reason
    chunked = found["4xT4@10gbit", "offload"]
    assert chunked.options["chunks"] > 1
    assert chunked.device_bytes < 17.2e9
    assert chunked.host_bytes > whole.host_bytes
    assert not any(one.fits for one in rows(SMALL, "2x1MB@1gbit").values())


def test_what_datasheets_promise() -> None:
    """Seconds of what is large, so that fixed costs are nothing beside it."""
    alone, shared = clusters_on(machines_of("4xT4@10gbit,2x8xA100@100gbit"), Config(), None)
    (prices,), (network,), (others,) = alone.profile.prices, alone.profile.networks, shared.profile.networks
    assert network.seconds("halo", 10**10) == pytest.approx(10**10 / (0.85 * 10e9 / 8), rel=1e-3)
    assert others.seconds("halo", 10**10) == pytest.approx(10**10 / (0.85 * 100e9 / 8 / 8), rel=1e-3)
    assert prices.seconds(KernelCall("pass", (10**9,))) == pytest.approx(10**9 / (0.8 * 320e9), rel=1e-2)
    rows, width = 1 << 20, 1024
    flops = 2 * rows * width * width
    assert prices.seconds(KernelCall("linear", (rows, width, width))) == pytest.approx(flops / (0.7 * 8.1e12), rel=1e-2)


def test_training_vertices_are_of_all_degrees() -> None:
    """What a step of few training vertices reads is the same share of small graphs, whatever hubs are among them."""
    described = DescribedGraph.parse(PAPERS + ",train=0.01")
    for halvings in (12, 13, 14):
        graph = described.generate(halvings)
        assert graph.train_mask is not None
        read = int(graph.in_edges.degree[graph.train_mask].sum())
        assert read / graph.num_edges == pytest.approx(0.0095, abs=0.001), halvings


def test_rows_on_the_host_come_over_its_link() -> None:
    found = rows(SMALL, "1xT4")
    clusters = clusters_on(machines_of("1xT4"), Config(), None)
    (prices,) = clusters[0].profile.prices
    assert prices.link_seconds == pytest.approx(1 / (0.8 * 15.75e9))
    assert found["1xT4", "offload"].compute_seconds > found["1xT4", "single"].compute_seconds


def test_workers_that_machines_do_not_have() -> None:
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
def test_numbers_that_cannot_be(spec: str, reason: str) -> None:
    with pytest.raises(InputError) as error:
        weft.plan(spec, machines="1xT4")
    assert_one_line(error, reason)


def test_a_described_graph_cannot_be_trained() -> None:
    with pytest.raises(InputError) as error:
        load(PAPERS)
    assert_one_line(error, "which only weft plan can use")


def test_drawn_graphs_have_the_mean_degree() -> None:
    described = DescribedGraph.parse(PAPERS + ",train=0.01,rmat=0.45/0.22/0.22")
    for halvings in (12, 14):
        graph = described.generate(halvings)
        assert graph.num_edges / graph.num_vertices == pytest.approx(1.6e9 / 111e6, rel=1e-3)
        assert graph.num_features, graph.num_classes == (128, 172)
        assert graph.train_mask is not None
        assert float(graph.train_mask.float().mean()) == pytest.approx(0.01, rel=0.1)
    skewed = DescribedGraph.parse(PAPERS).generate(12)
    assert skewed.in_edges.degree.max() > 2 * described.generate(12).in_edges.degree.max()


def test_a_small_described_graph_is_itself() -> None:
    """What it takes is what a graph of R-MAT of that size does."""
    graph = DescribedGraph.parse(SMALL).generate(0)
    clusters = clusters_on(machines_of("2xT4@10gbit"), Config(), None)
    config = Config(graph=SMALL, workers=1)
    there = estimate_strategies(config, subject_of(config, graph, None), clusters)
    told, values = planned(config, None, None, Where(machines="2xT4@10gbit"), approximate=False)
    seconds = {one.strategy: one.epoch_seconds for one in there}
    assert {one.strategy: one.epoch_seconds for one in told} == pytest.approx(seconds)
    assert values["fingerprint"] == ""
    assert not any("extrapolated" in note for note in values["notes"])
    assert all("weft train GRAPH " in one.command for one in told)


def test_what_is_extrapolated_is_what_the_large_graph_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times as many vertices, and twice as many ranks, as were looked at."""
    config = Config(graph="stats:vertices=32k,edges=320k,features=32,classes=8")
    clusters = clusters_on(machines_of("4xT4@10gbit,16xT4@10gbit"), Config(), None)
    asked = [
        (replace(config, strategy=strategy, workers=cluster.ranks), cluster)
        for strategy in ("communicated", "tensor", "cached")
        for cluster in clusters
    ]
    whole, small = subject_of(config, None, None), subject_of(config, None, None)
    assert isinstance(small, DescribedSubject)
    exact = [estimate_config(one, config, whole, cluster) for one, cluster in asked]
    monkeypatch.setattr("weft.training.planning.plan_subject.MAX_VERTICES", 4000)
    monkeypatch.setattr("weft.training.planning.plan_subject.MAX_RANKS", 8)
    assert small.size_ratio(4) == 8
    for (one, cluster), there in zip(asked, exact, strict=True):
        told = estimate_config(one, config, small, cluster)
        for name in ("sent_bytes", "device_bytes", "epoch_seconds"):
            most = 1.15 if one.workers == 4 else 1.4
            found = getattr(told, name) / getattr(there, name)
            assert 1 / most < found < most, (one.strategy, one.workers, name)
    assert "2 times from 2, 4 and 8 ranks" in small.explain(16)


def test_hybrid_is_told_no_dearer_than_what_it_chooses_from() -> None:
    """On small graphs it caches nearly all, on larger ones less: what it fetches outgrows them there, not for long."""
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
def test_a_large_graph_takes_no_more_to_plan_than_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph larger than the largest that may be drawn is, and no plan for more ranks than may be."""
    subject = subject_of(Config(graph=PAPERS), None, None)
    assert isinstance(subject, DescribedSubject)
    for ranks in (1, 4, 16, 256):
        points = [*subject.by_vertices(ranks), *subject.fewer_ranks(ranks)]
        assert max(one.planned.work.stats.num_edges for one in points) <= MAX_EDGES
        assert max(one.ranks for one in points) <= MAX_RANKS
        assert len({id(one.planned.work.model) for one in points}) == 1  # of which is found out once what chunks take
    monkeypatch.setattr("weft.training.planning.plan_subject.MAX_VERTICES", 1 << 11)
    found = rows(PAPERS, "256xA100@100gbit")
    assert found["256xA100@100gbit", "tensor"].fits
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20  # with the tests' own
