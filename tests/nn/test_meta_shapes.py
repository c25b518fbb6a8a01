"""Operations on meta tensors have the shapes, dtypes and strides that they have on real tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weft.nn.workload.flops import FlopCounter
from weft.nn.workload.meta_shapes import SHAPES

LIKE = torch.rand(3, 4, 5)
aten = torch.ops.aten
ROWS, ROW, COLUMN, NUMBER = torch.rand(6, 4), torch.rand(4), torch.rand(6, 1), torch.tensor(2.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.addmm(ROW, ROWS, torch.rand(4, 4)),
        lambda: torch.addmm(torch.rand(6, 2), ROWS, torch.rand(4, 2)),
        lambda: torch.block_diag(ROWS, ROWS, COLUMN),
        lambda: torch.block_diag(ROW, ROWS),
        lambda: torch.cat([ROWS, COLUMN], -1),
        lambda: torch.cat([ROWS, ROWS]),
        lambda: ROWS + ROW,
        lambda: COLUMN * ROW,
        lambda: ROWS / 2,
        lambda: ROWS - torch.tensor(1.0),
        lambda: ROWS + ROWS.double(),
        lambda: LIKE.mean(1),
        lambda: LIKE.mean((0, -1), keepdim=True),
        lambda: LIKE.sum(-1, dtype=torch.float64),
        lambda: LIKE.sum(()),
        lambda: LIKE**2,
        lambda: LIKE.rsqrt(),
        lambda: torch.relu(LIKE),
        lambda: -LIKE,
        lambda: torch.stack([LIKE, LIKE], -1),
        lambda: torch.stack([ROW, ROW]),
        lambda: torch.nn.functional.leaky_relu(LIKE),
        lambda: LIKE / 3,
        lambda: torch.nn.functional.elu(LIKE),
        lambda: torch.relu(LIKE.transpose(0, 1)),
        lambda: LIKE.transpose(0, 1) * 2,
        lambda: LIKE.transpose(0, 1) + LIKE.transpose(0, 1),
        lambda: torch.rand(4, 6).t() + ROWS,
        lambda: ROWS + torch.rand(4, 6).t(),
        lambda: torch.rand(6) * torch.rand(4, 1).expand(4, 6),
        lambda: torch.addmm(ROW, torch.rand(4, 6).t(), torch.rand(4, 4).t()),
        lambda: torch.relu(ROWS.view(6, 2, -1).transpose(0, 1)).transpose(0, 1).view(6, -1),
        lambda: torch.cat([LIKE.transpose(0, 1), LIKE.transpose(0, 1)]),
        lambda: torch.cat([LIKE.transpose(0, 1).contiguous(), LIKE.transpose(0, 1)]),
        lambda: torch.stack([LIKE.transpose(0, 1), LIKE.transpose(0, 1)]),
        lambda: torch.stack([LIKE, LIKE.flip(0).transpose(0, 2).contiguous().transpose(0, 2)]),
        lambda: torch.block_diag(ROWS.t(), ROWS),
        lambda: LIKE.transpose(0, 1).sum(0),
        lambda: LIKE.transpose(0, 2).mean(1, keepdim=True),
        lambda: aten.threshold_backward(LIKE, LIKE.transpose(0, 2).contiguous().transpose(0, 2), 0),
        lambda: aten.sum.dim_IntList(NUMBER, []),
        lambda: aten.mean.dim(NUMBER, [0]),
    ],
)
def test_equals_real_tensors(make: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    real = make()
    for name in ("LIKE", "ROWS", "ROW", "COLUMN", "NUMBER"):
        monkeypatch.setitem(globals(), name, globals()[name].to("meta"))
    with torch.device("meta"), FlopCounter():
        meta = make()
    assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())
    assert meta.is_meta


def test_a_planted_wrong_shape_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, torch.ops.aten.relu.default, lambda x: x.new_empty(1))
    with FlopCounter():
        assert torch.relu(torch.rand(3, device="meta")).shape == (1,)
