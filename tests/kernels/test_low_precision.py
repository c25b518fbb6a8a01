"""Kernels on bfloat16 rows on the CPU equal those in float32, rounded once, in every build."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.kernel_cases import edge_dropout, graph, randn
from weft.data.adjacency import Adjacency
from weft.kernels import Scale, cpu, keyed_dropout, reference, spmm, spmm_transposed
from weft.kernels.backend import Attention, AttentionInputs, SourceGrads
from weft.runtime.native import _native

WIDTHS = (1, 2, 5, 8, 19, 64, 131)


@pytest.fixture(autouse=True, params=_native.supported_isas())
def isa(request: Any) -> Iterator[None]:
    before = _native.current_isa()
    _native.set_isa(request.param)
    yield
    _native.set_isa(before)


def bfloat16_rows(*shape: int, seed: int) -> Tensor:
    return randn(*shape, seed=seed).bfloat16()


def block(width: int) -> Adjacency:
    """Return weighted edges from 40 to 23 vertices with a hub; ids are int64 for odd widths, otherwise int32."""
    adj = graph(40, 23, 300, seed=width, hub=True).with_weight(randn(300, seed=3, dtype=torch.float32))
    return replace(adj, indices=adj.indices.long()) if width % 2 else adj


def scale(adj: Adjacency) -> Scale:
    counts = adj.num_sources, adj.num_targets, adj.num_targets
    return Scale(*(randn(count, seed=seed, dtype=torch.float32) for seed, count in enumerate(counts)))


@pytest.mark.parametrize("width", WIDTHS)
def test_sums(width: int) -> None:
    adj, x = block(width), bfloat16_rows(40, width, seed=1)
    options: dict[str, Any] = {"scale": scale(adj), "weighted": True}
    wide, rounded = spmm(adj, x, **options, in_sum_dtype=True), spmm(adj, x, **options)
    factors = Scale(*(None if factor is None else factor.double() for factor in options["scale"]))
    wanted = reference.spmm(adj.cast(torch.float64), x.double(), scale=factors, weighted=True)
    torch.testing.assert_close(wide.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(rounded, wide.bfloat16())
    assert torch.equal(spmm(adj, x, **options), rounded)


@pytest.mark.parametrize("width", WIDTHS)
def test_adjoints_of_sums(width: int) -> None:
    """Adjoints of sums equal those in float32, also if they are added to existing rows of float32 or bfloat16."""
    adj, grad = block(width), bfloat16_rows(23, width, seed=2)
    options: dict[str, Any] = {"scale": scale(adj), "weighted": True}
    wide = spmm_transposed(adj, grad, **options, in_sum_dtype=True)
    wanted = spmm_transposed(adj, grad.float(), **options)
    assert torch.equal(wide, wanted)
    assert torch.equal(spmm_transposed(adj, grad, **options), wanted.bfloat16())
    for rows in (randn(40, width, seed=5, dtype=torch.float32), bfloat16_rows(40, width, seed=5)):
        into, sums = rows.clone(), rows.float()
        spmm_transposed(adj, grad.float(), **options, into=sums)
        assert torch.equal(spmm_transposed(adj, grad, **options, into=into), sums.to(rows.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_scattered_sums(width: int, weighted: bool, dtype: torch.dtype) -> None:
    """Rows that are added to those of their targets equal adjoints of sums, with one and with several threads."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    adj, grad = block(width).cast(wide), randn(23, width, seed=2).to(dtype)
    factors = Scale(*(factor.to(wide) for factor in scale(adj)[:2] if factor is not None))
    sums = randn(40, width, seed=5).to(wide)
    expected = spmm_transposed(adj, grad, scale=factors, weighted=weighted, into=sums.clone())
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(sums.clone())
        cpu.spmm_scatter(replace(adj, known_transpose=None), grad, factors, weighted, results[-1])
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(results[0], expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(results[0], results[1])


def test_sums_are_rounded_to_nearest_even() -> None:
    """Sums are rounded as PyTorch rounds: ties, overflow, infinity, subnormal numbers and NaN."""
    ties = torch.arange(1 << 9) * 2**-9 + 1
    largest = torch.tensor([3.3895314e38, 3.4e38, torch.inf, -torch.inf, torch.nan, 1e-40, 9.2e-41, -0.0])
    factors = torch.cat([ties, -ties, largest, randn(1 << 10, seed=1, dtype=torch.float32)])
    count = len(factors)
    each = torch.arange(count)
    adj = Adjacency.from_edges(each, each, num_sources=count, num_targets=count)
    for width in (1, 3, 16):
        x = torch.ones(count, width, dtype=torch.bfloat16)
        rounded, wanted = spmm(adj, x, scale=Scale(target=factors)), factors.bfloat16()[:, None].expand(-1, width)
        torch.testing.assert_close(rounded, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("bounds", [(0, 5), (0, 8, 16, 24, 32), (0, 3, 3, 90), tuple(range(0, 44, 4))], ids=str)
def test_attention(bounds: tuple[int, ...], dropout: float) -> None:
    """Attention equals float32, forward and backward from equal saved bfloat16 rows."""
    adj, width, num_heads = block(bounds[-1]).with_weight(None), bounds[-1], len(bounds) - 1
    loop = torch.arange(23) % 3 == 0
    over = Attention(adj=adj, bounds=bounds, loop=loop, slope=0.2, steps=1, dropout=edge_dropout(adj, dropout))
    inputs = (
        bfloat16_rows(40, width, seed=1),
        bfloat16_rows(40, num_heads, seed=2),
        bfloat16_rows(23, num_heads, seed=3),
    )
    y, saved = cpu.attend(over, *inputs, needs_logits=True)
    wanted, wanted_saved = cpu.attend(over, *(rows.float() for rows in inputs), needs_logits=True)
    for result, other in zip((y, *saved), (wanted, *wanted_saved), strict=True):
        assert torch.equal(result, other.to(result.dtype))
    assert [rows.dtype for rows in saved] == [torch.float32, torch.float32, torch.bfloat16], "softmaxes are in float32"

    grad = bfloat16_rows(23, width, seed=4)
    gradients = cpu.attend_backward(
        over, AttentionInputs(*inputs, y), saved, grad, needs_h=True, needs_logits=True, into=SourceGrads()
    )
    expected = cpu.attend_backward(
        over,
        AttentionInputs(*(rows.float() for rows in (*inputs, y))),
        [rows.float() for rows in saved],
        grad.float(),
        needs_h=True,
        needs_logits=True,
    )
    assert gradients[0] is not None
    assert expected[0] is not None
    assert torch.equal(gradients[0], expected[0].bfloat16())
    for gradient, other in zip(gradients[1] or (), expected[1] or (), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_dropout(width: int, relu: bool) -> None:
    x, rows = bfloat16_rows(20, width, seed=1), torch.arange(20).flip(0)
    options: dict[str, Any] = {"key": 7, "p": 0.3, "relu": relu}
    wide = x.float().requires_grad_()
    x.requires_grad_()
    dropped, wanted = keyed_dropout(x, rows, **options), keyed_dropout(wide, rows, **options)
    assert torch.equal(dropped, wanted.bfloat16())
    grad = bfloat16_rows(20, width, seed=2)
    dropped.backward(grad)
    wanted.backward(grad.float())
    assert x.grad is not None
    assert wide.grad is not None
    assert torch.equal(x.grad, wide.grad.bfloat16())


def test_intermediate_rounding_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are rounded after every addition (a planted error) differ from sums that are rounded once."""
    adj, x = block(8).with_weight(None), bfloat16_rows(40, 8, seed=1)
    source, target = adj.edges()
    rounded_often = torch.zeros(23, 8, dtype=torch.bfloat16)
    for u, v in zip(source.tolist(), target.tolist(), strict=True):
        rounded_often[v] += x[u]
    wanted = spmm(adj, x.float()).bfloat16()
    monkeypatch.setattr(cpu, "spmm", lambda *_: rounded_often)
    assert not torch.equal(spmm(adj, x), wanted)
