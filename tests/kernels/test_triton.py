"""Triton kernels equal the reference in every degree class, on a GPU or in Triton's interpreter.

The interpreter needs milliseconds for each program. Therefore graphs have tens of edges, and the thresholds between
degree classes are small.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import weft
from tests.lib.kernel_cases import (
    DTYPES,
    Case,
    assert_close,
    assert_same,
    attend_case,
    attend_edges_case,
    dot_case,
    drawn_graphs,
    edge_dropout,
    graph,
    graphs,
    max_case,
    pair_case,
    randn,
    rounded,
    spmm_case,
    truth,
)
from tests.lib.pairwise import param
from tests.lib.running import losses
from weft.data.adjacency import Adjacency, transpose_by_sorting
from weft.data.degrees import CompressedRows, DegreeClasses, Segments
from weft.kernels import (
    Attention,
    AttentionInputs,
    Scale,
    SourceGrads,
    attend,
    attend_and_save,
    attend_backward,
    attend_edges,
    cpu,
    keyed_dropout,
    ops,
    reference,
    spmm,
    spmm_max,
    spmm_max_positions,
    spmm_transposed,
)
from weft.nn.aggregate.relations import RelationRows
from weft.strategies.offload.memory_probe import MemoryProbe

SMALL, PIECE = 2, 6
HAS_GPU = torch.cuda.is_available()
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")])
INTERPRETED = pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="kernels are compiled, not interpreted"))


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    pytest.importorskip("triton", reason="kernels for a GPU need Triton")
    from weft.kernels import triton

    if not HAS_GPU:
        from triton.runtime import interpreter

        # Overflow checks of integers cost a third of the time, and hashes overflow intentionally.
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        interpreter.interpreter_builder.options = options
    return triton


@pytest.fixture(params=[INTERPRETED, GPU])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernels: ModuleType) -> str:
    """Run all operations with Triton kernels, and return the device of the tensors."""
    monkeypatch.setattr(ops, "backend_of", lambda _: kernels)
    return str(request.param)


@pytest.fixture(autouse=True)
def small_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    set_classes(monkeypatch, partial(DegreeClasses.of, small=SMALL, piece=PIECE))


def set_classes(monkeypatch: pytest.MonkeyPatch, make: Callable[[Tensor, int], DegreeClasses]) -> None:
    """Assign rows to degree classes with the function `make`."""
    classes = cached_property(lambda rows: make(rows.indptr, len(rows.indices)))
    classes.__set_name__(CompressedRows, "degree_classes")
    monkeypatch.setattr(CompressedRows, "degree_classes", classes)


def square(device: str = "cpu", index: torch.dtype = torch.int64) -> Adjacency:
    """Return a new graph with duplicate edges, self-loops, empty rows and a hub, without cached properties."""
    return copied(graph(17, 17, 40, seed=4, hub=True, index=index), device)


def block(device: str = "cpu", index: torch.dtype = torch.int32) -> Adjacency:
    """Return a bipartite graph with more sources than targets."""
    return copied(graph(19, 13, 40, seed=2, hub=True, index=index), device)


def copied(adj: Adjacency, device: str) -> Adjacency:
    return replace(adj).to(device)


def reversed_edges(adj: Adjacency) -> Adjacency:
    """Reverse all edges, so that a source is a hub."""
    source, target = adj.edges()
    return Adjacency.from_edges(
        target, source, num_sources=adj.num_targets, num_targets=adj.num_sources, weight=adj.weight
    )


CASES: dict[str, Callable[[Adjacency], Case]] = {
    "sum": partial(spmm_case, width=5, source=False, target=False, loop=False, weighted=False),
    "scaled sum": partial(spmm_case, width=8, source=True, target=True, loop=False, weighted=False),
    "weighted sum with loops": partial(spmm_case, width=5, source=True, target=True, loop=True, weighted=True),
    "maximum": partial(max_case, width=5),
    "attention": partial(attend_case, bounds=(0, 3)),
    "attention with loops": partial(attend_case, bounds=(0, 3, 3, 8), loop=True, steps=2, slope=0.1),
    "attention under dropout": partial(attend_case, bounds=(0, 2, 4), loop=True, dropout=0.4),
    "logits of pairs": partial(pair_case, bounds=(0, 3, 3, 8)),
    "logits of pairs with features": partial(pair_case, bounds=(0, 3, 5), features=5, loop=True),
    "dot products": partial(dot_case, bounds=(0, 3, 3, 8)),
    "attention by edges": partial(attend_edges_case, bounds=(0, 3, 3, 8)),
    "attention by edges with loops": partial(attend_edges_case, bounds=(0, 3, 5), loop=True, steps=2, dropout=0.4),
}


@pytest.mark.parametrize(
    ("name", "reverse"),
    [
        param(name, reverse, name=f"{reverse}-{name}", quick=HAS_GPU or number % 4 == 2 * reverse)
        for (number, name), reverse in product(enumerate(CASES), (False, True))
    ],
)
def test_parity(name: str, reverse: bool, device: str) -> None:
    """Results and gradients equal the reference for both dtypes of rows and indices, and hubs on both sides."""
    first, second = (block(device, torch.int32), square(device, torch.int64))[:: -1 if reverse else 1]
    if reverse:
        first, second = reversed_edges(first.to("cpu")).to(device), reversed_edges(second.to("cpu")).to(device)
    assert_same(first, CASES[name](first.to("cpu")), torch.float64)
    assert_same(second, CASES[name](second.to("cpu")), torch.float32)


def test_every_class_has_rows() -> None:
    for adj in (block(), square(), reversed_edges(square())):
        both: list[CompressedRows] = [adj, adj.transpose]
        for classes in (rows.degree_classes for rows in both):
            assert len(classes.small)
            assert len(classes.middle)
        assert any(len(rows.degree_classes.hubs) for rows in both)
        assert adj.copies is not None
        assert (adj.degree == 0).any()


@given(drawn_graphs(), st.integers(0, 9), st.integers(1, 9))
@settings(deadline=None, max_examples=50)
def test_classes_contain_every_entry_once(adj: Adjacency, small: int, more: int) -> None:
    classes = DegreeClasses.of(adj.indptr, adj.num_edges, small=small, piece=small + more)
    rows = [*classes.small.row.tolist(), *classes.middle.row.tolist(), *classes.hubs.row.tolist()]
    assert sorted(rows) == list(range(adj.num_targets))
    entries = [entry for part in (classes.small, classes.middle, classes.pieces) for entry in entries_of(part)]
    assert sorted(entries) == [(edge, row) for edge, row in enumerate(adj.edges()[1].tolist())]
    assert all(small < count <= small + more for count in classes.middle.count.tolist())
    assert all(count <= small for count in classes.small.count.tolist())
    owners = [row for first, row in entries_of(classes.hubs)]
    assert owners == classes.pieces.row.tolist()
    assert [piece for piece, _ in entries_of(classes.hubs)] == list(range(len(classes.pieces)))


def entries_of(segments: Segments) -> Iterator[tuple[int, int]]:
    """Yield the entries of segments with their rows."""
    for first, count, row in zip(segments.first.tolist(), segments.count.tolist(), segments.row.tolist(), strict=True):
        yield from ((entry, row) for entry in range(first, first + count))


@given(drawn_graphs())
@settings(deadline=None, max_examples=30)
def test_the_transpose_by_sorting_equals_the_cpus(adj: Adjacency) -> None:
    for edges in (adj, replace(adj, indices=adj.indices.int())):
        indptr, indices, edge_ids = transpose_by_sorting(edges)
        wanted = edges.transpose
        for result, expected in ((indptr, wanted.indptr), (indices, wanted.indices), (edge_ids, wanted.edge_ids)):
            assert result.dtype == expected.dtype
            assert torch.equal(result, expected)


@pytest.mark.parametrize("shape", [(1, 1, 0), (9, 9, 0)])
def test_no_edges(shape: tuple[int, int, int], device: str) -> None:
    for name in ("weighted sum with loops", "maximum", "attention with loops", "logits of pairs with features"):
        adj = copied(graph(*shape), device)
        assert_same(adj, CASES[name](adj.to("cpu")), torch.float64)


def test_no_columns(device: str) -> None:
    adj = square(device)
    assert spmm(adj, torch.zeros(17, 0, device=device)).shape == (17, 0)
    assert_same(adj, attend_case(square(), (0, 0, 0)), torch.float64)


@pytest.mark.parametrize(
    "name",
    [
        param(name, name=name, quick=HAS_GPU or "sum" in name)
        for name in ("weighted sum with loops", "attention with loops")
    ],
)
def test_heads_of_several_blocks_of_columns(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.kernels.triton import launch_config

    launch_config.column_blocks.cache_clear()
    monkeypatch.setattr(launch_config, "MAX_COLUMNS", 2)
    assert_same(block(device), CASES[name](block()), torch.float64)
    launch_config.column_blocks.cache_clear()


@pytest.mark.parametrize("name", ["maximum", "attention under dropout"])
def test_two_runs_have_the_same_bits(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs have equal bits, also with int64 offsets, which tensors of more than 2**31 elements need."""
    from weft.kernels.triton import launch_config

    case = CASES[name](block())
    first = case.run(ops, block(device), torch.float32)
    monkeypatch.setattr(launch_config, "INT64_NUMBERS", 0)
    assert same_bits(case.run(ops, block(device), torch.float32), first)


def same_bits(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_integers_are_exact(dtype: torch.dtype, device: str, kernels: ModuleType) -> None:
    """Weighted sums of integers and their adjoint are exact below 256, the limit of bfloat16 integers."""
    weight, x, grad = (
        randn(*shape, seed=seed).round().clamp(-2, 2) for seed, shape in ((2, (40,)), (1, (19, 8)), (3, (13, 8)))
    )
    adj = block().with_weight(weight)
    weighted, reverse = adj.cast(dtype).to(device), reversed_edges(adj)
    scale = Scale(target=torch.full((13,), 2.0, dtype=dtype, device=device))
    y = kernels.spmm(weighted, x.to(device, dtype), scale, True)
    assert torch.equal(y.cpu().double(), reference.spmm(adj, x, weighted=True) * 2)
    back = kernels.spmm_transposed(weighted, grad.to(device, dtype), scale, True)
    assert torch.equal(back.cpu().double(), reference.spmm(reverse, grad, weighted=True) * 2)


def test_rows_of_half_precision(device: str, kernels: ModuleType) -> None:
    """Attention and maxima of bfloat16 rows equal float32, rounded once (by the interpreter towards zero)."""
    adj, bounds = block(device), (0, 3, 8)
    h, src, dst = (randn(n, width, seed=width).bfloat16().to(device) for n, width in ((19, 8), (19, 2), (13, 2)))
    over = Attention(adj=adj, bounds=bounds, loop=None, slope=0.2, steps=1)
    y, _ = kernels.attend(over, h, src, dst, needs_logits=False)
    wanted, _ = kernels.attend(over, h.float(), src.float(), dst.float(), needs_logits=False)
    torch.testing.assert_close(y.float(), wanted, rtol=2**-7, atol=1e-6)
    for result, expected in zip(kernels.spmm_max(adj, h), kernels.spmm_max(adj, h.float()), strict=True):
        assert torch.equal(result, expected.to(result.dtype))


def test_sums_of_half_precision(device: str, kernels: ModuleType) -> None:
    """Sums of bfloat16 rows, also of hubs, are in float32 if requested, and otherwise rounded once."""
    adj = block(device).cast(torch.float32)
    x, grad = (randn(n, 8, seed=n).bfloat16().to(device) for n in (19, 13))
    scale = Scale(*(randn(n, seed=n, dtype=torch.float32).to(device) for n in (19, 13)))
    for run, rows in ((kernels.spmm, x), (kernels.spmm_transposed, grad)):
        wanted, wide, rounded = (
            run(adj, rows.float(), scale, True),
            run(adj, rows, scale, True, in_sum_dtype=True),
            run(adj, rows, scale, True),
        )
        assert torch.equal(wide, wanted)
        torch.testing.assert_close(rounded.float(), wanted, rtol=2**-7, atol=1e-6)
    into = torch.ones(19, 8, device=device)
    rounded = kernels.spmm_transposed(adj, grad, scale, True, into)
    wanted = kernels.spmm_transposed(adj, grad, scale, True, in_sum_dtype=True) + 1
    # A GPU multiplies by the scale and adds in one instruction, which rounds once instead of twice.
    torch.testing.assert_close(rounded, wanted, rtol=2**-23, atol=2**-22)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [param(1, name="1", quick=HAS_GPU), param(2, name="2", quick=True)])
def test_gradients_of_attention_of_half_precision(steps: int, device: str) -> None:
    """Gradients equal those in float32, up to the rows that forward saves, which every step rounds once."""
    adj, bounds = square(device), (0, 3, 8)
    narrow = [
        randn(17, width, seed=seed).bfloat16().to(device).requires_grad_() for seed, width in ((1, 8), (2, 2), (3, 2))
    ]
    wide = [rows.detach().float().requires_grad_() for rows in narrow]
    y, wanted = (ops.attend(adj, *rows, bounds=bounds, steps=steps) for rows in (narrow, wide))
    grad = randn(17, 8, seed=4).bfloat16().to(device)
    y.backward(grad)
    wanted.backward(grad.float())
    for rows, other in zip(narrow, wide, strict=True):
        assert rows.grad is not None
        assert other.grad is not None
        size = float(other.grad.abs().max())
        torch.testing.assert_close(rows.grad.float(), other.grad, rtol=2**-7, atol=4 * steps * 2**-7 * size)


@pytest.mark.parametrize("name", ["weighted sum with loops", "logits of pairs"])
def test_gradients_equal_finite_differences(name: str, device: str) -> None:
    adj = copied(graph(6, 6, 14), device)
    case = CASES[name](adj.to("cpu"))
    inputs = [(x + 0.1 * randn(*x.shape, seed=8)).to(device).requires_grad_() for x in case.inputs]
    assert torch.autograd.gradcheck(lambda *tensors: case.call(ops, adj, list(tensors)), inputs, fast_mode=True)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_has_the_bits_of_the_cpu(dtype: torch.dtype, relu: bool, device: str, kernels: ModuleType) -> None:
    """Dropout has the bits of the CPU, forward and backward, for large ids and keys, at zero and NaN."""
    x, rows = randn(20, 41, seed=1, dtype=dtype), torch.arange(20).flip(0) * 1_000_003 + 2**33
    x[0], x[1, :3] = 0, torch.nan
    for key, p, first in ((2**63 + 11, 0.3, 5), (1, 0.9, 2**31 - 60)):
        dropped = kernels.keyed_dropout(x.to(device), rows.to(device), key, p, first, relu).cpu()
        wanted = cpu.keyed_dropout(x, rows, key, p, first, relu)
        torch.testing.assert_close(dropped, wanted, rtol=0, atol=0, equal_nan=True)
        back = kernels.relu_dropout_backward(wanted.to(device), x.to(device), p).cpu()
        torch.testing.assert_close(back, cpu.relu_dropout_backward(wanted, x, p), rtol=0, atol=0, equal_nan=True)


def test_dropout_through_autograd(device: str) -> None:
    x, rows = randn(9, 5, seed=1).to(device).requires_grad_(), torch.arange(9, device=device)
    y = keyed_dropout(x, rows, key=3, p=0.5)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(grad != 0, y != 0)


def test_masks_of_edges_equal_the_cpus(device: str, kernels: ModuleType) -> None:
    """Masks of edges, also of duplicates, equal those of the CPU; a negative weight marks a dropped edge."""
    adj, dropout = square(), edge_dropout(square(), 0.5)
    logits, h = randn(adj.num_edges + 17, 3, seed=1), randn(17, 3, seed=2)
    over = Attention(adj=adj, bounds=(0, 1, 2, 3), loop=~adj.has_loop, slope=1.0, steps=1, dropout=dropout)
    _, wanted, _ = cpu.attend_edges(over, h, logits)
    edges = square(device)
    assert edges.copies is not None
    moved = replace(over, adj=edges, loop=~edges.has_loop, dropout=edge_dropout(edges, 0.5))
    _, weights, _ = kernels.attend_edges(moved, h.to(device), logits.to(device))
    assert torch.equal(weights.cpu() < 0, wanted < 0)
    assert (wanted < 0).any()


def test_gradients_are_added(device: str) -> None:
    """Gradients of sums and of attention are added to existing rows, in every degree class."""
    adj = reversed_edges(square()).to(device)
    scale = Scale(*(randn(17, seed=seed).to(device) for seed in (5, 6, 7)))
    grad, before = (randn(17, 5, seed=seed).to(device) for seed in (1, 2))
    gradient = spmm_transposed(adj, grad, scale=scale, weighted=True)
    into = before.clone()
    assert spmm_transposed(adj, grad, scale=scale, weighted=True, into=into) is into
    torch.testing.assert_close(into, before + gradient, rtol=1e-12, atol=1e-12)
    over = Attention(adj=adj, bounds=(0, 2, 5), loop=~adj.has_loop, slope=0.2, steps=1)
    h, src, dst = (randn(17, width, seed=seed).to(device) for width, seed in ((5, 1), (2, 2), (2, 3)))
    y, saved = attend_and_save(over, h, src, dst)
    inputs, logits = AttentionInputs(h, src, dst, y), randn(17, 2, seed=6).to(device)
    wanted_h, wanted = attend_backward(over, inputs, saved, grad)
    sums = SourceGrads(before.clone(), logits.clone())
    found_h, grads = attend_backward(over, inputs, saved, grad, sums)
    assert (found_h, grads.source) == sums
    torch.testing.assert_close(found_h, before + wanted_h, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads.source, logits + wanted.source, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads.target, wanted.target, rtol=0, atol=0)


def test_gradients_only_where_needed(device: str) -> None:
    case, adj = attend_case(square(), (0, 2, 5), loop=True), square(device)
    _, *whole = truth(square(), case)
    for wanted in range(3):
        inputs = [x.to(device, copy=True).requires_grad_(index == wanted) for index, x in enumerate(case.inputs)]
        y = case.call(ops, adj, inputs)
        (grad,) = torch.autograd.grad(y, inputs[wanted], randn(*y.shape, seed=99).to(device))
        assert_close([grad], [whole[wanted]], torch.float64)


def test_positions_of_maxima(device: str) -> None:
    """The first of equal maxima wins, also in hubs. -inf is an ordinary number, and NaN is the largest."""
    adj = block(device)
    x = randn(19, 4, seed=5).round()
    x[:, 1] = -torch.inf
    y, position = spmm_max_positions(adj, x.to(device))
    not_empty = block().degree > 0
    assert torch.equal(position.cpu().long()[not_empty], reference.max_position(block(), x)[not_empty])
    assert torch.equal(y.cpu(), reference.spmm_max(block(), x))
    x[3, 2] = torch.nan
    maxima = spmm_max(adj, x.to(device)).cpu()
    torch.testing.assert_close(maxima, reference.spmm_max(block(), x), equal_nan=True, rtol=0, atol=0)


def test_attention_survives_extreme_logits(device: str) -> None:
    """Large positive and negative logits are handled; -inf removes an edge, and a row without edges is zero."""
    adj = square(device)
    src, dst = (rounded(randn(17, 2, seed=seed)).mul(3000) for seed in (1, 2))
    src[::4] = dst[5] = -torch.inf
    h, bounds = rounded(randn(17, 6, seed=3)), [0, 3, 6]
    y = attend(adj, *(x.float().to(device) for x in (h, src, dst)), bounds=bounds).cpu()
    torch.testing.assert_close(y.double(), reference.attend(square(), h, src, dst, bounds=bounds), rtol=1e-2, atol=1e-2)
    assert (y[5] == 0).all()
    logits = rounded(randn(40, 2, seed=4)).mul(3000)
    logits[::4] = -torch.inf
    y = attend_edges(adj, h.float().to(device), logits.float().to(device), bounds=bounds).cpu()
    wanted = reference.attend_edges(square(), h, logits, bounds=bounds)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-2, atol=1e-2)


def test_typed_means(device: str) -> None:
    """Means of each target and relation, and their gradients, equal the reference."""
    adj, types = block(), torch.arange(40) % 3
    edges = RelationRows.of(adj, types, 3).in_edges
    mean = Scale(target=1 / edges.degree.double())

    def run(edges: Adjacency, module: ModuleType, location: str) -> list[Tensor]:
        x = randn(19, 5, seed=1).to(location).requires_grad_()
        y = module.spmm(edges, x, scale=Scale(*(None if factor is None else factor.to(location) for factor in mean)))
        return [y.detach(), *torch.autograd.grad(y, x, randn(*y.shape, seed=2).to(location))]

    assert_close(run(edges.to(device), ops, device), run(edges, reference, "cpu"), torch.float64)


@pytest.mark.parametrize("slot_ids", [None, torch.tensor([4, 0, 2])], ids=["in order", "to places"])
def test_rows_are_moved(slot_ids: Tensor | None, device: str, kernels: ModuleType) -> None:
    """Rows are copied from a pinned table of the host to slots, and added from slots to the table."""
    table, rows, slots = randn(9, 5, seed=1), torch.tensor([1, 4, 8]), randn(6, 5, seed=2)
    table = table.pin_memory() if device == "cuda" else table
    into = torch.arange(3) if slot_ids is None else slot_ids
    wanted, added = slots.clone(), table.clone()
    wanted[into], added[rows] = table[rows], table[rows] + slots[into]
    out = slots.to(device, copy=True)
    moved = None if slot_ids is None else slot_ids.to(device)
    kernels.gather_rows(table, rows.to(device), out, moved)
    kernels.add_rows(table, rows.to(device), slots.to(device), moved)
    assert torch.equal(out.cpu(), wanted)
    assert torch.equal(table.cpu(), added)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "model"), [("single", "gatv2"), ("offload", "gat")])
def test_a_run_has_the_losses_of_the_cpus_kernels(
    strategy: str, model: str, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Runs on CPU tensors check which arguments strategies pass to the kernels; tests/training/test_gpu.py has more."""
    if HAS_GPU:
        pytest.skip("kernels are compiled, not interpreted")
    set_classes(monkeypatch, DegreeClasses.of)  # Nearly all rows are small, which saves programs.
    # The probe of memory would run on thousands of edges.
    monkeypatch.setattr(MemoryProbe, "peak", lambda *_, **__: 0)
    options: dict[str, Any] = {"hidden": 6, "heads": 2, "attention_dropout": 0.3, "epochs": 2, "dtype": "float64"}
    options |= {"chunks": 2} if strategy == "offload" else {}
    runs = []
    for backend in (cpu, kernels):
        monkeypatch.setattr(ops, "backend_of", lambda _, backend=backend: backend)
        out = tmp_path / backend.__name__
        weft.train(
            "sbm:vertices=40,degree=4,features=5,classes=3", model, strategy=strategy, out=out, quiet=True, **options
        )
        runs.append(losses(out))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-9, atol=1e-9)


class TestPlantedErrors:
    """Errors that the tests of this file must detect."""

    @pytest.mark.parametrize(
        "name", [param(name, name=name, quick=HAS_GPU or number % 3 == 0) for number, name in enumerate(CASES)]
    )
    def test_a_missing_piece(self, name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(indptr: Tensor, num_entries: int) -> DegreeClasses:
            classes = DegreeClasses.of(indptr, num_entries, small=SMALL, piece=PIECE)
            count = classes.pieces.count.clone()
            count[-1:] = 0
            return replace(classes, pieces=replace(classes.pieces, count=count))

        set_classes(monkeypatch, broken)
        if name.startswith("logits"):  # The forward pass runs edge by edge, so only gradients use pieces.
            name = "logits of pairs"
        with pytest.raises(AssertionError):
            assert_same(block(device), CASES[name](block()), torch.float64)

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [
            param(name, wrong, name=f"{name}-{wrong}", quick=HAS_GPU or number % 3 == 0)
            for number, (name, wrong) in enumerate(
                product(
                    ("attention under dropout", "attention by edges with loops"),
                    ({"first_head": 0}, {"copies": None}, {"threshold": 2**30}),
                )
            )
        ],
    )
    def test_a_wrong_mask(self, name: str, wrong: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from weft.kernels.triton import additive_attention, edge_attention

        original = additive_attention.dropout_arguments
        for module in (additive_attention, edge_attention):
            monkeypatch.setattr(module, "dropout_arguments", lambda *arguments: original(*arguments) | wrong)
        with pytest.raises(AssertionError):
            assert_same(square(device), CASES[name](square()), torch.float64)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
class TestOnGpu:
    """Default thresholds of degree classes, larger graphs, and the selection of the backend."""

    @pytest.fixture(autouse=True)
    def small_thresholds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_classes(monkeypatch, DegreeClasses.of)

    @pytest.mark.parametrize(("dtype", "index"), [(torch.float32, torch.int32), (torch.float64, torch.int64)], ids=str)
    @pytest.mark.parametrize("width", [7, 16, 100, 300])
    def test_parity_matrix(self, width: int, dtype: torch.dtype, index: torch.dtype) -> None:
        bounds = (0, width // 4, width // 2, width)
        for adj in graphs(index):
            on_device = adj.to("cuda")
            for case in (
                spmm_case(adj, width, source=True, target=False, loop=True, weighted=True),
                spmm_case(adj, width, source=False, target=True, loop=False, weighted=False),
                max_case(adj, width),
                attend_case(adj, bounds, loop=True, steps=2, dropout=0.3),
                pair_case(adj, bounds, features=3, loop=True),
                attend_edges_case(adj, bounds, loop=True, steps=2, dropout=0.3),
            ):
                assert_same(on_device, case, dtype)

    def test_hubs_of_many_pieces(self) -> None:
        """Hubs of many pieces equal the reference, with equal bits in every run."""
        adj = graph(5000, 5000, 60_000, seed=9, hub=True, index=torch.int32)
        for case in (case(adj) for case in CASES.values()):
            runs = [case.run(ops, adj.to("cuda"), torch.float64) for _ in range(2)]
            assert same_bits(*runs)
            for result, expected in zip(runs[0], truth(adj, case), strict=True):
                torch.testing.assert_close(result.cpu(), expected, rtol=1e-10, atol=1e-9)

    def test_triton_is_the_backend(self, kernels: ModuleType) -> None:
        assert ops.backend_of(torch.zeros(1, device="cuda")) is kernels


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
@pytest.mark.timeout(1800)
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """Every kernel compiles, also without a GPU: the interpreter accepts more than the compiler."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.lib.compile_triton", str(tmp_path)]
    subprocess.run(command, check=True, timeout=1700)
