"""Keyed dropout, with the same mask as on the CPU."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from weft.kernels.triton.device import dropout as device
from weft.kernels.triton.launch_config import MAX_COLUMNS, TILE, kernel_types, launch_items
from weft.utils.random import RandomKey, key_on


def keyed_dropout(x: Tensor, rows: Tensor, key: RandomKey, p: float, first_column: int, relu: bool) -> Tensor:
    y, (num_rows, width) = torch.empty_like(x), x.shape
    size = min(triton.next_power_of_2(max(width, 1)), MAX_COLUMNS)
    num_blocks = triton.cdiv(width, size)
    tensors = x, rows.contiguous(), y, num_rows, width, num_blocks
    drops = key_on(key, x.device), int(p * 2**32), first_column, 1 / (1 - p)
    launch_items(
        device.keyed_dropout,
        num_rows,
        TILE // size,
        *tensors,
        *drops,
        programs=num_blocks,
        RELU=relu,
        C=size,
        **kernel_types(x),
    )
    return y


def relu_dropout_backward(y: Tensor, grad_y: Tensor, p: float) -> Tensor:
    grad_x = torch.empty_like(grad_y)
    launch_items(
        device.relu_dropout_backward, y.numel(), TILE, y, grad_y, grad_x, y.numel(), 1 / (1 - p), **kernel_types(y)
    )
    return grad_x
