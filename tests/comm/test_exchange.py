"""rows_to_cols and cols_to_rows are inverse and adjoint, with exact byte counts; a lost peer is an error."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from tests.lib.ranks import on_ranks, spawn
from weft.comm import (
    ColumnLayout,
    Group,
    cols_to_rows,
    column_layout,
    count_shared,
    even_bounds,
    rows_to_cols,
    sum_over_ranks,
    sum_shared,
)
from weft.utils.errors import RunError


def whole(num_rows: int, width: int) -> Tensor:
    return torch.arange(num_rows * width, dtype=torch.float64).view(num_rows, width) + 1


def check_exchange(group: Group) -> None:
    rank, size = group.rank, group.size
    for num_rows, width in [(11, 7), (2, 3), (5, 1), (0, 4), (6, 0)]:
        layout = column_layout(even_bounds(num_rows, size), width)
        x_NF = whole(num_rows, width)
        x_nF = x_NF[layout.rows[rank] : layout.rows[rank + 1]].clone().requires_grad_()
        ((start, stop),) = layout.columns[rank]
        group.meter.take("setup")
        x_Nf = rows_to_cols(x_nF, layout, group)
        counts = group.meter.take("setup")
        assert counts.bytes_sent["rows_to_cols"] == 8 * x_nF[:, : width - (stop - start)].numel()
        assert counts.bytes_received["rows_to_cols"] == 8 * (x_Nf.numel() - len(x_nF) * (stop - start))
        assert torch.equal(x_Nf, x_NF[:, start:stop])
        assert torch.equal(cols_to_rows(x_Nf, layout, group), x_nF)
        x_Nf.backward(x_NF[:, start:stop] * 2)
        assert x_nF.grad is not None
        assert torch.equal(x_nF.grad, x_nF * 2)

    # Overlapping columns: the adjoint of sending a column to several ranks is the sum of their gradients.
    everywhere = ColumnLayout(rows=even_bounds(5, size), columns=(((0, 1), (2, 3)),) * size)
    rows = whole(5, 3)[everywhere.rows[rank] : everywhere.rows[rank + 1]].requires_grad_()
    columns = rows_to_cols(rows, everywhere, group)
    assert torch.equal(columns, whole(5, 3)[:, [0, 2]])
    columns.sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad, torch.tensor([[size, 0.0, size]], dtype=torch.float64).expand(len(rows), 3))

    values = torch.full((3,), float(rank + 1), requires_grad=True)
    total = sum_over_ranks(values, group, tag="statistics")
    assert total.tolist() == [size * (size + 1) / 2] * 3
    (total * (rank + 1)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == total.tolist()

    reports = group.all_gather_object({"rank": rank, "text": "a" * rank})
    assert reports == [{"rank": other, "text": "a" * other} for other in range(size)]


def check_shared(group: Group) -> None:
    """Check sums, gradients and bytes for columns of one, two and all ranks, and for a rank without columns."""
    rank, size = group.rank, group.size
    for columns in ([(0, 2), (1, 3), (1, 2), (3, 3)], [(0, 1)] * size, [(r, r + 1) for r in range(size)]):
        for num_rows in (0, 2, 11):
            start, stop = columns[rank]
            x = (whole(num_rows, 4)[:, start:stop] * (rank + 1)).requires_grad_()
            weights = [
                sum(other + 1 for other in range(size) if columns[other][0] <= column < columns[other][1])
                for column in range(start, stop)
            ]
            group.meter.take("setup")
            total = sum_shared(x, columns, group)
            counts, (sent, received) = group.meter.take("setup"), count_shared(columns, num_rows, rank)
            assert counts.bytes_sent["logits"] == counts.bytes_received["logits"] == 8 * (sent + received)
            assert torch.equal(total, whole(num_rows, 4)[:, start:stop] * torch.tensor(weights, dtype=torch.float64))
            total.backward(torch.full_like(total, rank + 1.0))
            assert x.grad is not None
            assert torch.equal(x.grad, torch.tensor(weights, dtype=torch.float64).expand(num_rows, -1))


def test_shared_columns() -> None:
    on_ranks(4, check_shared)


@pytest.mark.parametrize("size", [1, 3])
def test_exchange(size: int) -> None:
    on_ranks(size, check_exchange)


def lose_a_peer(group: Group) -> str:
    if group.rank == 1:
        group.close()
        return "gone"
    time.sleep(1)
    with pytest.raises(RunError) as caught, group.meter.during("train", "epoch 3, training"):
        group.all_reduce(torch.ones(3), tag="gradients")
    return str(caught.value)


def test_a_lost_peer_is_named() -> None:
    first, _ = spawn(2, lose_a_peer, timeout_seconds=2)
    assert first.startswith("rank 0 lost rank 1 in epoch 3, training, all_reduce 'gradients', after")
    assert "\n" not in first
