"""Keyed dropout has exactly the defined mask, however rows and columns are split into blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.kernel_cases import DTYPES
from weft.kernels import keyed_dropout, reference
from weft.utils.random import mix64

MASK32 = 2**32 - 1


def keeps(key: int, row: int, column: int, p: float) -> bool:
    """Return whether dropout keeps an element, by the definition of the mask in Python integers."""
    return bits_of(mix64(key ^ row), column) >= int(p * 2**32)


def bits_of(mixed: int, column: int) -> int:
    """Return the hash of a word and a column."""
    bits = ((mixed & MASK32) + column * 0x9E3779B9) & MASK32
    bits ^= bits >> 16
    bits = bits * 0x21F0AAAD & MASK32
    bits ^= bits >> 15
    bits ^= mixed >> 32
    bits = bits * 0x735A2D97 & MASK32
    return bits ^ (bits >> 15)


@pytest.mark.usefixtures("backend")
@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 2**40), max_size=6),
    st.integers(0, 40),
    st.integers(0, 2**31),
    st.floats(0.001, 0.999),
    st.sampled_from(DTYPES),
)
@settings(deadline=None, max_examples=40)
def test_mask_equals_its_definition(key, rows, width, first_column, p, dtype):
    x = torch.ones(len(rows), width, dtype=dtype)
    y = keyed_dropout(x, torch.tensor(rows, dtype=torch.int64), key=key, p=p, first_column=first_column)
    mask = [[keeps(key, row, first_column + column, p) for column in range(width)] for row in rows]
    expected = torch.tensor(mask, dtype=dtype).reshape(x.shape) / (1 - p)
    torch.testing.assert_close(y, expected)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("relu", [False, True])
def test_a_64_bit_key_in_a_profiler_that_records_shapes(relu):
    x, rows, key = torch.randn(9, 5, requires_grad=True), torch.arange(9), 2**64 - 1
    expected = keyed_dropout(x, rows, key=key, p=0.5, relu=relu)
    with torch.profiler.profile(record_shapes=True):
        y = keyed_dropout(x, rows, key=key, p=0.5, relu=relu)
    assert torch.equal(y, expected)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_equals_its_part_of_the_whole(dtype):
    x, rows = torch.rand(30, 41, dtype=dtype), torch.arange(30).flip(0) * 1_000_003
    whole = keyed_dropout(x, rows, key=7, p=0.4)
    part = keyed_dropout(x[11:25, 5:38], rows[11:25], key=7, p=0.4, first_column=5)
    assert torch.equal(part, whole[11:25, 5:38])


@pytest.mark.usefixtures("backend")
def test_forward_and_backward_equal_the_reference():
    rows = torch.arange(50)
    x = torch.randn(50, 19, dtype=torch.float64, requires_grad=True)
    y = keyed_dropout(x, rows, key=2**63 + 5, p=0.3)
    assert torch.equal(y, reference.keyed_dropout(x, rows, key=2**63 + 5, p=0.3))
    (grad,) = torch.autograd.grad(y, x, torch.full_like(x, 2.0))
    assert torch.equal(grad, (y.detach() != 0).double() * (2 * (1 / (1 - 0.3))))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 16, 41])
def test_fused_relu(width, dtype):
    """Fused ReLU and dropout have the bits of ReLU followed by dropout, forward and backward, also at zero and NaN."""
    rows = torch.arange(50) + 2**33
    x = torch.randn(50, width, dtype=dtype)
    x[0], x[1] = 0, torch.nan
    fused, separate = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = keyed_dropout(fused, rows, key=11, p=0.3, first_column=2, relu=True)
    expected = keyed_dropout(torch.relu(separate), rows, key=11, p=0.3, first_column=2)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    grad = torch.randn_like(x)
    (gradient,), (expected_gradient,) = (
        torch.autograd.grad(y, fused, grad),
        torch.autograd.grad(expected, separate, grad),
    )
    assert torch.equal(gradient[2:], expected_gradient[2:])
    assert torch.equal(gradient[0], torch.zeros_like(gradient[0]))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_and_independence(p):
    """A million samples have the right rate, also by row and by column; neighbours and keys are uncorrelated."""
    rows = torch.arange(1000)
    first, second = (keyed_dropout(torch.ones(1000, 1000), rows, key=key, p=p) == 0 for key in (1, 2))
    spread = (p * (1 - p)) ** 0.5
    assert abs(first.float().mean() - p) < 5 * spread / 1000
    for dim in (0, 1):
        assert (first.float().mean(dim) - p).abs().max() < 6 * spread / 1000**0.5
    pairs = [(first, second), (first[1:], first[:-1]), (first[:, 1:], first[:, :-1]), (first[1:, 1:], first[:-1, :-1])]
    for a, b in pairs:
        assert abs((a & b).float().mean() - p * p) < 6 * spread / 1000


def test_p_of_zero_drops_nothing():
    x = torch.rand(3, 4)
    assert keyed_dropout(x, torch.arange(3), key=1, p=0.0) is x
    assert torch.equal(keyed_dropout(x - 0.5, torch.arange(3), key=1, p=0.0, relu=True), torch.relu(x - 0.5))
