"""The feature cache of mini-batches changes no bit and counts its hits; pre-sampling balances and estimates samples."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import weft
from tests.lib.cases import Case
from tests.lib.graphs import NUM_FEATURES
from tests.lib.ranks import on_ranks
from tests.lib.session import Given, part_by, workload
from weft.comm import Group
from weft.data.sampling import layer_key, parse_fanouts
from weft.partition import metis
from weft.runtime.memory import limit as module
from weft.strategies.split import plan as split_plan
from weft.strategies.split.feature_cache import FeatureCache, most_read
from weft.strategies.split.pre_sampling import EPOCH, pre_sample
from weft.strategies.split.sampler import BatchSampler, exchange_requests_locally
from weft.training.tasks.metrics import NodeTask
from weft.utils.errors import InputError

ROW_BYTES = 8 * NUM_FEATURES
PLAIN = Case(model="sage", layers=2, num_vertices=60)
TYPED = Case(model="rgcn", typed="some", layers=2, bases=2, num_vertices=60)
BATCHES = Given(batch_size="4", fanout="2", seed=5)


@dataclass(frozen=True)
class Results:
    """Results of two epochs without an optimizer on one rank."""

    losses: list[float]
    gradients: dict[str, Tensor]
    counts: Counter[str]
    num_cached: int


def train(group: Group, case: Case, name: str, options: Given, planted: str = "") -> Results:
    work = workload(case)
    placed = options.plan(name, work, group.size).place(group, seed=7)
    if planted:
        plant(planted, placed._tables.x)
    task, losses, counts = NodeTask(work.graph, placed.rows, group), [], Counter[str]()
    group.meter.take("train")
    for epoch in range(2):
        with group.meter.during("train"):
            for step in placed.steps(epoch):
                rows = placed.forward(step)
                loss, grad = task.loss(rows, step)
                placed.backward(rows, grad)
                losses.append(loss.item())
        counts += group.meter.take("train").sampled
    gradients = {name: p.grad for name, p in placed.model.named_parameters() if p.grad is not None}
    return Results(losses, gradients, counts, placed.describe()["feature_cache_rows"])


def plant(error: str, cache: FeatureCache) -> None:
    """Change the first cached row, or let the vertex of the first cached row read the second one."""
    if error == "stale row":
        cache.rows[0] += 1e-3
    else:
        cache.position[cache.position == 0] = 1


def is_same(left: Results, right: Results) -> bool:
    return left.losses == right.losses and all(
        torch.equal(left.gradients[name], right.gradients[name]) for name in left.gradients
    )


@pytest.mark.parametrize(
    ("name", "case", "rows", "size"),
    [
        pytest.param("split", PLAIN, 3, 1, marks=pytest.mark.slow),
        ("split", PLAIN, 7, 2),
        pytest.param("split", PLAIN, 100, 3, marks=pytest.mark.slow),
        ("sampled", PLAIN, 9, 2),
        ("split", TYPED, 4, 2),
    ],
)
def test_no_bit_changes_and_hits_are_exact(name: str, case: Case, rows: int, size: int) -> None:
    part = part_by("random", case, size) if size > 1 else None
    options = Given(**BATCHES, partition=part, cache_memory=rows * ROW_BYTES)
    plain = on_ranks(size, train, case, name, Given(**BATCHES, partition=part))
    work = workload(case)
    plan = options.plan(name, work, size)
    has_features = torch.ones(case.num_vertices, dtype=torch.bool)
    if case.typed:
        has_features[work.graph.type_range("c").start :] = False
    cached, expected = [plan.cached_vertices(rank) for rank in range(size)], [Counter[str]() for _ in range(size)]
    for epoch in range(2):
        for number in range(len(plan.sampler.batches(epoch))):
            for rank, batch in enumerate(plan.sample_batch(epoch, number)):
                hits = int(torch.isin(batch.rows, cached[rank]).sum())
                expected[rank] += Counter(cache_hits=hits, cache_misses=int(has_features[batch.rows].sum()) - hits)
    for rank, (with_cache, without_cache) in enumerate(
        zip(on_ranks(size, train, case, name, options), plain, strict=True)
    ):
        assert is_same(with_cache, without_cache)
        assert all(with_cache.counts[key] == expected[rank][key] for key in ("cache_hits", "cache_misses"))
        assert with_cache.counts["cache_hits"] > 0
        assert "cache_hits" not in without_cache.counts
        assert with_cache.num_cached == len(cached[rank])
        if not case.typed:
            assert (
                with_cache.counts["cache_hits"] + with_cache.counts["cache_misses"] == with_cache.counts["rows_loaded"]
            )


@pytest.mark.parametrize("error", ["stale row", "wrong place"])
def test_a_planted_error_shows(error: str) -> None:
    options = Given(**BATCHES, cache_memory=100 * ROW_BYTES)
    plain = train(Group(), PLAIN, "split", BATCHES)
    assert is_same(train(Group(), PLAIN, "split", options), plain)
    assert not is_same(train(Group(), PLAIN, "split", options, error), plain)


def test_under_split_a_row_is_cached_by_its_owner_only() -> None:
    """Under `sampled`, in contrast, each rank caches the rows that all ranks together read most."""
    options = Given(**BATCHES, partition=part_by("random", PLAIN, 3), cache_memory=7 * ROW_BYTES)
    split, sampled = (options.plan(name, workload(PLAIN), 3) for name in ("split", "sampled"))
    for rank in range(3):
        cached = split.cached_vertices(rank)
        assert len(cached) == 7
        assert (split.part[cached] == rank).all()
        is_owned = split.part == rank
        assert (
            split.pre_sample().reads[cached].min() >= split.pre_sample().reads[is_owned].sort(descending=True).values[6]
        )
        assert torch.equal(sampled.cached_vertices(rank), sampled.cached_vertices(0))


def test_the_most_read_rows_that_fit_are_cached() -> None:
    reads, row_bytes = torch.tensor([1, 5, 9, 5, 7, 0]), torch.tensor([8, 8, 0, 8, 16, 8])
    assert most_read(torch.arange(6), reads, row_bytes, 31).tolist() == [1, 4]
    assert most_read(torch.arange(6), reads, row_bytes, 1000).tolist() == [0, 1, 3, 4, 5]
    assert most_read(torch.tensor([0, 3, 5]), reads, row_bytes, 8).tolist() == [3]


@pytest.mark.parametrize(
    ("options", "case", "message"),
    [
        ({"cache_memory": ROW_BYTES - 1}, PLAIN, f"the features of a vertex take {ROW_BYTES} bytes: give as many"),
        ({"cache_memory": 10**15}, PLAIN, "on 1 rank would need .* of memory, but only"),
        ({"cache_memory": 10**9}, Case(model="rgcn", typed="none"), "has no effect, since .* has no features"),
        ({"cache_memory": 10**9, "batch_size": "all", "fanout": "all"}, PLAIN, "a batch of all vertices is read once"),
    ],
)
def test_a_cache_of_no_use_is_refused(options: dict[str, int], case: Case, message: str) -> None:
    plan = Given(**BATCHES | options).plan("split", workload(case))
    with pytest.raises(InputError, match=f"^--cache-memory .*{message}"):
        plan.check_fits()


def test_a_cache_of_all_ranks_together_fits_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Given(**BATCHES, partition=part_by("random", PLAIN, 2), cache_memory=2 * ROW_BYTES)
    one_rank, two_ranks = (options.plan("split", workload(PLAIN), size) for size in (1, 2))
    monkeypatch.setattr(module, "memory_limit_bytes", lambda: 3 * ROW_BYTES)
    one_rank.check_fits()
    with pytest.raises(InputError, match="on 2 ranks would need"):
        two_ranks.check_fits()


def hub_sampler() -> BatchSampler:
    graph = weft.load("rmat:vertices=2k,edges=30k", random_features=1, random_classes=4)
    return BatchSampler(
        graph=graph, size=1, part=None, fanouts=parse_fanouts("8,4"), batch_size=200, method="uniform", seed=3
    )


def edge_skew(sampler: BatchSampler, part: Tensor) -> float:
    """Return (max - min) / mean over ranks of the edges sampled in a training epoch (GSplit, table 5)."""
    split, edges = replace(sampler, size=4, part=part), torch.zeros(4)
    for number, vertices in enumerate(split.batches(0)):
        batches = exchange_requests_locally([split.sample(vertices, rank, 0, number) for rank in range(4)])
        edges += torch.tensor([sum(hop.block.num_edges for hop in batch.hops) for batch in batches])
    return ((edges.max() - edges.min()) / edges.mean()).item()


def test_a_partition_weighted_by_pre_sampling_balances_the_edges() -> None:
    sampler = hub_sampler()
    pre_sampled = pre_sample(sampler)
    before, after = (edge_skew(sampler, metis(sampler.graph, 4, 0, weights)) for weights in (None, pre_sampled.weights))
    assert before > 1
    assert after < 0.2


def test_pre_sampling_depends_on_its_keys_only() -> None:
    """Pre-sampling is the same for any number of ranks, and no training epoch samples with its keys."""
    sampler = hub_sampler()
    alone, split = pre_sample(sampler), pre_sample(replace(sampler, size=3, part=metis(sampler.graph, 3, 0)))
    assert torch.equal(alone.reads, split.reads)
    assert torch.equal(alone.edges, split.edges)
    assert int(alone.edges.sum()) > 0
    assert not torch.equal(alone.edges, pre_sample(replace(sampler, seed=4)).edges)
    first = {layer_key(3, EPOCH, 0, 0), *(layer_key(3, epoch, 0, 0) for epoch in range(100))}
    assert len(first) == 101


def test_a_plan_from_a_state_computes_no_partition() -> None:
    work = workload(PLAIN)
    plan = BATCHES.plan("split", work, 3)
    assert plan.state() == torch.bincount(plan.part, plan.pre_sample().edges, 3).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(split_plan, "metis")
        patch.delattr(split_plan, "pre_sample")
        other = Given(**BATCHES, partition=plan.options.partition).plan("split", work, 3, plan.state())
    assert torch.equal(other.part, plan.part)
    assert other.state() == plan.state()
