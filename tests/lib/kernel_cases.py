"""Graphs, operations and comparisons that the kernel tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType

import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.kernels import EdgeDropout, EdgeFeatures, Scale, ops, reference

DTYPES = [torch.float32, torch.float64]
cached = lru_cache(1000)
"""Cache of graphs, cases and reference results, which backends, instruction sets and dtypes share."""


@cached
def graph(
    num_sources: int,
    num_targets: int,
    num_edges: int,
    *,
    seed: int = 0,
    hub: bool = False,
    index: torch.dtype = torch.int64,
) -> Adjacency:
    """Return random weighted edges, with duplicates and self-loops; with a hub, a third of them ends in one target."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(num_sources, (num_edges,), generator=generator)
    target = torch.randint(num_targets, (num_edges,), generator=generator)
    if hub:
        target[: num_edges // 3] = num_targets // 2
    weight = torch.rand(num_edges, generator=generator, dtype=torch.float64) + 0.5
    adj = Adjacency.from_edges(source, target, num_sources=num_sources, num_targets=num_targets, weight=weight)
    return replace(adj, indices=adj.indices.to(index))


def graphs(index: torch.dtype) -> list[Adjacency]:
    """Return edge cases: no edge, isolated vertices, blocks wide and tall, duplicates, more rows than one chunk."""
    return [
        graph(1, 1, 0, index=index),
        graph(9, 9, 0, index=index),
        graph(40, 40, 25, seed=1, index=index),
        graph(23, 7, 160, seed=2, index=index),
        graph(5, 31, 90, seed=3, index=index),
        graph(61, 61, 1500, seed=4, hub=True, index=index),
    ]


@st.composite
def drawn_graphs(draw: st.DrawFn) -> Adjacency:
    num_targets = draw(st.integers(1, 30))
    num_sources = draw(st.integers(num_targets, 40) | st.just(num_targets))
    num_edges = draw(st.sampled_from([0, 1, 5, 40, 400]))
    return graph(num_sources, num_targets, num_edges, seed=draw(st.integers(0, 2**31)), hub=draw(st.booleans()))


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@dataclass(frozen=True, eq=False)
class Case:
    """An operation of `ops` or `reference`: `inputs` get gradients, `call` supplies all other arguments."""

    call: Callable[[ModuleType, Adjacency, list[Tensor]], Tensor]
    inputs: list[Tensor]

    def run(self, module: ModuleType, adj: Adjacency, dtype: torch.dtype) -> list[Tensor]:
        """Return the result and the gradient of every input, for a fixed random gradient of the result."""
        inputs = [tensor.to(adj.device, dtype, copy=True).requires_grad_() for tensor in self.inputs]
        y = self.call(module, adj.cast(dtype), inputs)
        grad_y = randn(*y.shape, seed=99, dtype=dtype).to(adj.device)
        grads = torch.autograd.grad(y, inputs, grad_y, materialize_grads=True)
        return [y.detach(), *grads]


@cached
def spmm_case(adj: Adjacency, width: int, *, source: bool, target: bool, loop: bool, weighted: bool) -> Case:
    def vector(length: int, seed: int, x: Tensor) -> Tensor:
        return randn(length, seed=seed).abs().add(0.1).to(x)

    def call(module: ModuleType, adj: Adjacency, inputs: list[Tensor]) -> Tensor:
        (x,) = inputs
        scale = Scale(
            source=vector(adj.num_sources, 1, x) if source else None,
            target=vector(adj.num_targets, 2, x) if target else None,
            loop=vector(adj.num_targets, 3, x) if loop and adj.num_targets <= adj.num_sources else None,
        )
        return module.spmm(adj, x, scale=scale, weighted=weighted)

    return Case(call, [rounded(randn(adj.num_sources, width, seed=4))])


@cached
def max_case(adj: Adjacency, width: int) -> Case:
    x = randn(adj.num_sources, width, seed=5).mul(2).round()  # many ties
    return Case(lambda module, adj, inputs: module.spmm_max(adj, *inputs), [x])


@cached
def attend_case(
    adj: Adjacency,
    bounds: tuple[int, ...],
    *,
    loop: bool = False,
    steps: int = 1,
    slope: float = 0.2,
    dropout: float = 0.0,
) -> Case:
    num_heads = len(bounds) - 1

    def call(module: ModuleType, adj: Adjacency, inputs: list[Tensor]) -> Tensor:
        square = adj.num_targets == adj.num_sources
        flags = ~adj.has_loop if loop and adj.num_targets <= adj.num_sources else None
        drops = edge_dropout(adj, dropout)
        number = steps if square else 1
        return module.attend(adj, *inputs, bounds=bounds, loop=flags, slope=slope, steps=number, dropout=drops)

    sizes = [(adj.num_sources, bounds[-1]), (adj.num_sources, num_heads), (adj.num_targets, num_heads)]
    return Case(call, [rounded(randn(*size, seed=seed)) for seed, size in enumerate(sizes)])


def edge_dropout(adj: Adjacency, p: float, *, key: int = 2**63 + 11) -> EdgeDropout | None:
    """Return dropout with large ids that differ from row numbers and between sources and targets; None if p is 0."""
    targets, sources = (torch.arange(count, device=adj.device) for count in (adj.num_targets, adj.num_sources))
    return EdgeDropout(p, key, 2, sources.flip(0) * 1_000_003, targets + 2**33) if p else None


@cached
def pair_case(
    adj: Adjacency, bounds: tuple[int, ...], *, features: int = 0, loop: bool = False, slope: float = 0.2
) -> Case:
    """Return a case of logits, with self-loops; inputs: left and right rows, attention vector, edge weights."""
    loops = loop and adj.num_targets <= adj.num_sources
    edge_features = EdgeFeatures(
        rounded(randn(adj.num_edges, features, seed=7)), rounded(randn(adj.num_targets, features, seed=8))
    )

    def call(module: ModuleType, adj: Adjacency, inputs: list[Tensor]) -> Tensor:
        cast = EdgeFeatures(*(x.to(inputs[0]) for x in edge_features)) if features else None
        flags = ~adj.has_loop if loops else None
        return module.pair_logits(adj, *inputs, bounds=bounds, loop=flags, slope=slope, features=cast)

    width = bounds[-1]
    sizes = [(adj.num_sources, width), (adj.num_targets, width), (width,), *([(features, width)] if features else [])]
    return Case(call, [rounded(randn(*size, seed=seed)) for seed, size in enumerate(sizes)])


@cached
def dot_case(adj: Adjacency, bounds: tuple[int, ...]) -> Case:
    sizes = [(adj.num_sources, bounds[-1]), (adj.num_targets, bounds[-1])]
    inputs = [rounded(randn(*size, seed=seed)) for seed, size in enumerate(sizes)]
    return Case(lambda module, adj, inputs: module.dot_logits(adj, *inputs, bounds=bounds), inputs)


@cached
def attend_edges_case(
    adj: Adjacency, bounds: tuple[int, ...], *, loop: bool = False, steps: int = 1, dropout: float = 0.0
) -> Case:
    loops = loop and adj.num_targets <= adj.num_sources

    def call(module: ModuleType, adj: Adjacency, inputs: list[Tensor]) -> Tensor:
        square = adj.num_targets == adj.num_sources
        flags = ~adj.has_loop if loops else None
        drops = edge_dropout(adj, dropout)
        return module.attend_edges(adj, *inputs, bounds=bounds, loop=flags, steps=steps if square else 1, dropout=drops)

    sizes = [(adj.num_sources, bounds[-1]), (adj.num_edges + loops * adj.num_targets, len(bounds) - 1)]
    return Case(call, [rounded(randn(*size, seed=seed)) for seed, size in enumerate(sizes)])


def rounded(x: Tensor) -> Tensor:
    """Return float64 values that float32 represents exactly, so that both dtypes compute on equal numbers."""
    return x.float().double()


def assert_same(adj: Adjacency, case: Case, dtype: torch.dtype) -> None:
    """Assert that result and gradients equal the float64 reference, up to the rounding of the dtype."""
    assert_close(case.run(ops, adj, dtype), truth(adj.to("cpu"), case), dtype)


def assert_close(results: list[Tensor], expected_results: list[Tensor], dtype: torch.dtype) -> None:
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12
    for actual, expected in zip(results, expected_results, strict=True):
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@cached
def truth(adj: Adjacency, case: Case) -> list[Tensor]:
    return case.run(reference, replace(adj, indices=adj.indices.long()), torch.float64)
