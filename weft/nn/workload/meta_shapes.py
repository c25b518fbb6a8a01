"""Results without data of what models do most, for which PyTorch works in Python, up to a hundred times as long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def meta_result(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The result of an operation on tensors without data; None: of this one PyTorch is to find out."""
    if func is aten.mm.default:
        return matmul(*args)
    shape = SHAPES.get(func)
    if shape is None or "dtype" in kwargs:
        return None
    return shape(*args) if is_plain(args[0][0] if isinstance(args[0], list) else args[0]) else None


def is_plain(x: Any) -> bool:
    """Whether it is a tensor of floating-point numbers without data, as which its results would stand in memory."""
    return isinstance(x, Tensor) and x.is_meta and x.is_floating_point() and x.is_contiguous()


def unary(x: Tensor, *others: Any) -> Tensor | None:
    """Number by number, of one tensor, or of two that one made of the other."""
    return x.new_empty(x.shape) if all(is_plain(one) for one in others if isinstance(one, Tensor)) else None


def binary(x: Tensor, y: Any, *_: Any) -> Tensor | None:
    """Number by number, of two tensors, of which one may be a row or a column, or of one and a number."""
    if isinstance(y, float | int):
        return x.new_empty(x.shape)
    alike = is_plain(y) and x.dtype == y.dtype
    return x.new_empty(torch.broadcast_shapes(x.shape, y.shape)) if alike else None


def matmul(x: Tensor, y: Tensor) -> Tensor | None:
    """Rows one after the other, however those of the two matrices stand."""
    alike = x.is_meta and y.is_meta and x.dtype == y.dtype and x.dim() == y.dim() == 2 and x.shape[1] == y.shape[0]
    return x.new_empty(x.shape[0], y.shape[1]) if alike else None


def addmm(bias: Tensor, x: Tensor, weight: Tensor, *_: Any) -> Tensor | None:
    """A product to which a row, or one for each, is added."""
    alike = bias.dtype == x.dtype and bias.shape[-1:] == weight.shape[1:]
    return matmul(x, weight) if alike else None


def block_diag(blocks: Sequence[Tensor]) -> Tensor | None:
    """Matrices along a diagonal."""
    if any(block.dim() != 2 for block in blocks):
        return None
    return blocks[0].new_empty(*map(sum, zip(*(block.shape for block in blocks), strict=True)))


def cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    """Tensors one after the other."""
    if any(part.dim() != parts[0].dim() or part.dtype != parts[0].dtype for part in parts):
        return None
    shape = [*parts[0].shape]
    shape[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].new_empty(shape)


def stack(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors that are alike, along a dimension of their own."""
    shape = [*parts[0].shape]
    shape.insert(dim % (len(shape) + 1), len(parts))
    return parts[0].new_empty(shape)


def reduction(x: Tensor, dims: Sequence[int] | None, keepdim: bool = False) -> Tensor | None:
    """Sums or means along some dimensions, or all."""
    if x.dim() == 0:
        return None
    along = {dim % x.dim() for dim in dims or range(x.dim())}
    sizes = [1 if dim in along else size for dim, size in enumerate(x.shape) if keepdim or dim not in along]
    return x.new_empty(sizes)


SHAPES: dict[Any, Callable[..., Tensor | None]] = {
    aten.addmm.default: addmm,
    aten.block_diag.default: block_diag,
    aten.cat.default: cat,
    **dict.fromkeys(
        (
            aten.div.Scalar,
            aten.elu.default,
            aten.elu_backward.default,
            aten.empty_like.default,
            aten.leaky_relu.default,
            aten.leaky_relu_backward.default,
            aten.mul.Scalar,
            aten.neg.default,
            aten.pow.Tensor_Scalar,
            aten.relu.default,
            aten.rsqrt.default,
            aten.threshold_backward.default,
        ),
        unary,
    ),
    aten.mean.dim: reduction,
    aten.stack.default: stack,
    aten.sum.dim_IntList: reduction,
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor), binary),
}
