"""Sampled in-edges equal those of a plain reference implementation, for any number of threads."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.data.sampling.reference import sample
from tests.lib.graph_checks import CALM
from weft.data import Adjacency
from weft.data.sampling import ALL, METHODS, KeyTransition, SampledEdges, dependent_batch_key, sample_layer
from weft.utils.errors import InputError

KEY = 0xC0FFEE_0123_4567_89
TRANSITION = KeyTransition(next_key=99, share=0.3)
RELATIONS = 3


def graph(*, seed: int = 0, vertices: int = 40, edges: int = 1500, dtype: torch.dtype = torch.float64) -> Adjacency:
    """Return a graph of skewed in-degrees with empty rows, loops and duplicates; a tenth of the weights is 0."""
    random = torch.Generator().manual_seed(seed)
    source = torch.randint(vertices, (edges,), generator=random)
    target = (torch.rand(edges, generator=random) ** 4 * (vertices - 3)).long()
    weight = torch.rand(edges, generator=random, dtype=dtype) ** 3
    weight[torch.rand(edges, generator=random) < 0.1] = 0
    return Adjacency.from_edges(source, target, num_sources=vertices, num_targets=vertices, weight=weight)


def rows(edges: SampledEdges) -> list[list[tuple[int, float]]]:
    pairs = list(zip(edges.edge_ids.tolist(), edges.scale().tolist(), strict=True))
    starts = edges.indptr.tolist()
    return [pairs[a:b] for a, b in pairwise(starts)]


def assert_same(edges: SampledEdges, expected: SampledEdges) -> None:
    for name in ("indptr", "edge_ids", "sources", "row_scale", "edge_scale"):
        a, b = getattr(edges, name), getattr(expected, name)
        assert a is b is None or torch.equal(a, b), name


def assert_equals_reference(in_edges: Adjacency, targets: Tensor, fanout: Any, **options: Any) -> SampledEdges:
    edges = sample_layer(in_edges, targets, fanout, **options)
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in options.items()}
    expected = sample(in_edges, targets.tolist(), fanout, **plain)
    assert [[e for e, _ in row] for row in rows(edges)] == [[e for e, _ in row] for row in expected]
    scales = [scale for row in expected for _, scale in row]
    torch.testing.assert_close(edges.scale(), torch.tensor(scales, dtype=torch.float64), rtol=1e-12, atol=0)
    assert torch.equal(edges.sources, in_edges.indices[edges.edge_ids.long()])
    assert edges.edge_ids.dtype == torch.int32
    return edges


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("k", [0, 1, 2, 7, 33, 200, 10**6, ALL])
def test_samples_equal_the_reference(method: str, k: int) -> None:
    targets = torch.randperm(40, generator=torch.Generator().manual_seed(k + 1))
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(7))[:40]
    for optional_ids in (None, ids):
        assert_equals_reference(graph(), targets, k, key=KEY, method=method, ids=optional_ids)
    if method == "labor":
        assert_equals_reference(graph(), targets, k, key=KEY, method=method, transition=TRANSITION, ids=ids)


@pytest.mark.parametrize("k", [1, 5, 20, 32, 33, 300, 2000, 19_999])
def test_samples_equal_the_reference_from_a_hub(k: int) -> None:
    """Samples are right with every data structure: word, ranks, bitmap or table of the chosen or the omitted edges."""
    for d in (63, 64, 65, 100, 128, 384, 385, 2690, 20_000):
        hub = Adjacency(indptr=torch.tensor([0, 0, d]), indices=torch.zeros(d, dtype=torch.int32), num_sources=2)
        for key in range(3):
            assert_equals_reference(hub, torch.tensor([1]), k, key=key, method="uniform")


@pytest.mark.parametrize("method", METHODS)
def test_fanouts_by_relation(method: str) -> None:
    whole = graph()
    kind = torch.randint(RELATIONS, (whole.num_edges,), generator=torch.Generator().manual_seed(1))
    for fanout in ((3, 0, 50), (ALL, 1, 5), (0, 0, 0), (8,) * RELATIONS):
        for dtype in (torch.int16, torch.int32):
            options = {"key": KEY, "method": method, "edge_type": kind.to(dtype)}
            edges = assert_equals_reference(whole, torch.arange(40), fanout, **options)
            assert_same(edges, sample_layer(whole, torch.arange(40), fanout, num_threads=2, **options))


@CALM
@given(
    st.integers(0, 2**64 - 1),
    st.integers(1, 40),
    st.integers(0, 300),
    st.integers(0, 30),
    st.sampled_from(sorted(METHODS)),
)
def test_any_graph(key: int, vertices: int, edges: int, k: int, method: str) -> None:
    whole = graph(seed=edges, vertices=vertices + 3, edges=edges)
    assert_equals_reference(whole, torch.arange(vertices + 3), k, key=key, method=method)


@pytest.mark.parametrize(("method", "transition"), [*((method, None) for method in METHODS), ("labor", TRANSITION)])
def test_same_bits_for_any_threads_and_split(method: str, transition: KeyTransition | None) -> None:
    whole = graph(vertices=5000, edges=100_000, dtype=torch.float32)
    options: dict[str, Any] = {"key": KEY, "method": method, "transition": transition}
    targets = torch.randperm(5000, generator=torch.Generator().manual_seed(3))
    expected = sample_layer(whole, targets, 9, num_threads=1, **options)
    for threads in (2, 3):
        assert_same(sample_layer(whole, targets, 9, num_threads=threads, **options), expected)
    pieces = [sample_layer(whole, piece, 9, **options) for piece in targets.tensor_split([0, 1, 17, 2500])]
    assert [row for piece in pieces for row in rows(piece)] == rows(expected)


def test_wide_ids() -> None:
    """int64 source ids give the same samples as int32 ids."""
    narrow = graph()
    wide = Adjacency(
        indptr=narrow.indptr, indices=narrow.indices.long(), num_sources=narrow.num_sources, weight=narrow.weight
    )
    for method in METHODS:
        a, b = (sample_layer(edges, torch.arange(40), 5, key=KEY, method=method) for edges in (narrow, wide))
        assert b.sources.dtype == torch.int64
        assert torch.equal(a.sources.long(), b.sources)
        assert torch.equal(a.edge_ids, b.edge_ids)


def test_short_rows_are_sampled_completely() -> None:
    """All edges of a row are sampled if there are at most `fanout`, or with `all`. Duplicates are separate edges."""
    row = Adjacency(indptr=torch.tensor([0, 4, 4]), indices=torch.tensor([1, 1, 1, 1]), num_sources=2)
    for k in (4, 5, ALL):
        edges = sample_layer(row, torch.tensor([1, 0, 1]), k, key=KEY)
        assert edges.indptr.tolist() == [0, 0, 4, 4]
        assert edges.edge_ids.tolist() == [0, 1, 2, 3]
        assert edges.scale().tolist() == [1.0] * 4
    assert len(set(sample_layer(row, torch.tensor([0]), 3, key=KEY).edge_ids.tolist())) == 3
    shared = sample_layer(row, torch.tensor([0]), 3, key=KEY, method="labor")
    assert shared.num_edges in (0, 4)  # duplicates share their source's variate
    none = sample_layer(row, torch.empty(0, dtype=torch.int64), 3, key=KEY)
    assert none.indptr.tolist() == [0]
    assert none.num_edges == 0


def test_edges_of_weight_zero_are_not_sampled() -> None:
    weight = torch.tensor([0.0, 2.0, 0.0, 1e-30, 0.0, 0.0])
    row = Adjacency(
        indptr=torch.tensor([0, 6]), indices=torch.zeros(6, dtype=torch.int32), num_sources=1, weight=weight
    )
    for key in range(20):
        edges = sample_layer(row, torch.tensor([0]), 2, key=key, method="weighted")
        assert rows(edges) == [[(1, 1.0), (3, 1.0)]]
    none = sample_layer(row.with_weight(0 * weight), torch.tensor([0]), 2, key=KEY, method="weighted")
    assert none.num_edges == 0


def test_dependent_batches_change_slowly() -> None:
    """Random numbers change from one key to the next over kappa batches; with kappa 1, batches are independent."""
    whole, targets = graph(vertices=2000, edges=60_000), torch.arange(2000)
    samples = []
    for batch in range(9):
        key, transition = dependent_batch_key(5, 1, batch=batch, kappa=8)
        samples.append(
            set(sample_layer(whole, targets, 5, key=key, method="labor", transition=transition).edge_ids.tolist())
        )
    differences = [len(samples[0] ^ edges) for edges in samples]
    assert differences == sorted(differences)
    assert 5 * differences[1] < 2 * differences[8]
    (key, transition), (next_key, _) = (dependent_batch_key(5, batch=batch, kappa=8) for batch in (7, 8))
    assert transition == KeyTransition(next_key=next_key, share=7 / 8)
    assert key == dependent_batch_key(5, batch=0, kappa=8)[0]
    assert dependent_batch_key(5, batch=3, kappa=1)[1].share == 0


def test_errors_name_the_argument() -> None:
    whole, targets = graph(), torch.arange(3)
    bare = whole.with_weight(None)
    for problem, words in (
        (lambda: sample_layer(whole, torch.tensor([40]), 2, key=1), "not a vertex"),
        (lambda: sample_layer(whole, torch.tensor([-1]), 2, key=1), "not a vertex"),
        (lambda: sample_layer(whole, targets, -2, key=1), "fanout"),
        (lambda: sample_layer(whole, targets, (2, 2), key=1), "edge_type"),
        (lambda: sample_layer(bare, targets, 2, key=1, method="weighted"), "weights"),
        (lambda: sample_layer(bare, targets, 2, key=1, transition=TRANSITION), "labor"),
        (lambda: dependent_batch_key(1, batch=0, kappa=0), "kappa"),
        (lambda: sample_layer(bare.with_weight(-whole.weight), targets, 2, key=1, method="weighted"), "negative"),
        (lambda: sample_layer(bare.with_weight(whole.weight / 0), targets, 2, key=1, method="weighted"), "finite"),
        (
            lambda: sample_layer(
                whole, targets, (2, 2), key=1, edge_type=torch.full((whole.num_edges,), 2, dtype=torch.int16)
            ),
            "each relation needs a fanout",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            problem()
    with pytest.raises(InputError, match="unknown sampling method 'labour'"):
        sample_layer(whole, targets, 2, key=1, method="labour")
