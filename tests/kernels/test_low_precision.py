"""Rows of bfloat16 on the CPU: what float32 makes of the same rows, rounded once, by each build of the kernels."""

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


def narrow(*shape: int, seed: int) -> Tensor:
    return randn(*shape, seed=seed).bfloat16()


def block(width: int) -> Adjacency:
    """Edges from 40 to 23 vertices, one of them a hub, with weights; ids of either width."""
    made = graph(40, 23, 300, seed=width, hub=True).with_weight(randn(300, seed=3, dtype=torch.float32))
    return replace(made, indices=made.indices.long()) if width % 2 else made


def scale(adj: Adjacency) -> Scale:
    counts = adj.num_sources, adj.num_targets, adj.num_targets
    return Scale(*(randn(count, seed=seed, dtype=torch.float32) for seed, count in enumerate(counts)))


@pytest.mark.parametrize("width", WIDTHS)
def test_sums(width: int) -> None:
    adj, x = block(width), narrow(40, width, seed=1)
    options: dict[str, Any] = {"scale": scale(adj), "weighted": True}
    wide, found = spmm(adj, x, **options, in_sum_dtype=True), spmm(adj, x, **options)
    factors = Scale(*(None if one is None else one.double() for one in options["scale"]))
    wanted = reference.spmm(adj.cast(torch.float64), x.double(), scale=factors, weighted=True)
    torch.testing.assert_close(wide.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found, wide.bfloat16())
    assert torch.equal(spmm(adj, x, **options), found)


@pytest.mark.parametrize("width", WIDTHS)
def test_adjoints_of_sums(width: int) -> None:
    """Also added to rows of either type, which are rounded once more."""
    adj, grad = block(width), narrow(23, width, seed=2)
    options: dict[str, Any] = {"scale": scale(adj), "weighted": True}
    wide = spmm_transposed(adj, grad, **options, in_sum_dtype=True)
    wanted = spmm_transposed(adj, grad.float(), **options)
    assert torch.equal(wide, wanted)
    assert torch.equal(spmm_transposed(adj, grad, **options), wanted.bfloat16())
    for there in (randn(40, width, seed=5, dtype=torch.float32), narrow(40, width, seed=5)):
        into, sums = there.clone(), there.float()
        spmm_transposed(adj, grad.float(), **options, into=sums)
        assert torch.equal(spmm_transposed(adj, grad, **options, into=into), sums.to(there.dtype))


def test_sums_go_to_the_nearest_and_of_two_to_the_even_one() -> None:
    """As PyTorch rounds: ties, numbers too large, infinities, subnormal ones and those that are none."""
    ties = torch.arange(1 << 9) * 2**-9 + 1
    largest = torch.tensor([3.3895314e38, 3.4e38, torch.inf, -torch.inf, torch.nan, 1e-40, 9.2e-41, -0.0])
    factors = torch.cat([ties, -ties, largest, randn(1 << 10, seed=1, dtype=torch.float32)])
    count = len(factors)
    each = torch.arange(count)
    adj = Adjacency.from_edges(each, each, num_sources=count, num_targets=count)
    for width in (1, 3, 16):
        x = torch.ones(count, width, dtype=torch.bfloat16)
        found, wanted = spmm(adj, x, scale=Scale(target=factors)), factors.bfloat16()[:, None].expand(-1, width)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("bounds", [(0, 5), (0, 8, 16, 24, 32), (0, 3, 3, 90), tuple(range(0, 44, 4))], ids=str)
def test_attention(bounds: tuple[int, ...], dropout: float) -> None:
    """Forward, and backward from the same rows that were kept, which are narrow."""
    adj, width, num_heads = block(bounds[-1]).with_weight(None), bounds[-1], len(bounds) - 1
    loop = torch.arange(23) % 3 == 0
    over = Attention(adj=adj, bounds=bounds, loop=loop, slope=0.2, steps=1, dropout=edge_dropout(adj, dropout))
    inputs = narrow(40, width, seed=1), narrow(40, num_heads, seed=2), narrow(23, num_heads, seed=3)
    y, kept = cpu.attend(over, *inputs, needs_logits=True)
    wanted, wanted_kept = cpu.attend(over, *(one.float() for one in inputs), needs_logits=True)
    for one, other in zip((y, *kept), (wanted, *wanted_kept), strict=True):
        assert torch.equal(one, other.to(one.dtype))
    assert [one.dtype for one in kept] == [torch.float32, torch.float32, torch.bfloat16], "softmaxes are in float32"

    grad = narrow(23, width, seed=4)
    found = cpu.attend_backward(
        over, AttentionInputs(*inputs, y), kept, grad, needs_h=True, needs_logits=True, into=SourceGrads()
    )
    expected = cpu.attend_backward(
        over,
        AttentionInputs(*(one.float() for one in (*inputs, y))),
        [one.float() for one in kept],
        grad.float(),
        needs_h=True,
        needs_logits=True,
    )
    assert found[0] is not None
    assert expected[0] is not None
    assert torch.equal(found[0], expected[0].bfloat16())
    for one, other in zip(found[1] or (), expected[1] or (), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_dropout(width: int, relu: bool) -> None:
    x, rows = narrow(20, width, seed=1), torch.arange(20).flip(0)
    options: dict[str, Any] = {"key": 7, "p": 0.3, "relu": relu}
    wide = x.float().requires_grad_()
    x.requires_grad_()
    found, wanted = keyed_dropout(x, rows, **options), keyed_dropout(wide, rows, **options)
    assert torch.equal(found, wanted.bfloat16())
    grad = narrow(20, width, seed=2)
    found.backward(grad)
    wanted.backward(grad.float())
    assert x.grad is not None
    assert wide.grad is not None
    assert torch.equal(x.grad, wide.grad.bfloat16())


def test_rounding_in_between_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error: sums that are rounded entry by entry differ from those that are rounded once."""
    adj, x = block(8).with_weight(None), narrow(40, 8, seed=1)
    source, target = adj.edges()
    rounded_often = torch.zeros(23, 8, dtype=torch.bfloat16)
    for u, v in zip(source.tolist(), target.tolist(), strict=True):
        rounded_often[v] += x[u]
    wanted = spmm(adj, x.float()).bfloat16()
    monkeypatch.setattr(cpu, "spmm", lambda *_: rounded_often)
    assert not torch.equal(spmm(adj, x), wanted)
