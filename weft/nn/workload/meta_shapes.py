"""Fast results of frequent operations on meta tensors, for which PyTorch's Python code is up to 100 times as slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def meta_result(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the result of an operation on meta tensors; None: PyTorch has to compute it.

    Args:
        func: The operator overload.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if func is aten.mm.default:
        return matmul(*args)
    if func in IN_PLACE:
        return args[0] if args[0].is_meta else None
    shape = SHAPES.get(func)
    if shape is None or "dtype" in kwargs:
        return None
    return shape(*args) if is_row_major_meta(args[0][0] if isinstance(args[0], list) else args[0]) else None


def is_row_major_meta(x: Any) -> bool:
    """Return whether x is a floating-point meta tensor by rows, so that results are contiguous.

    It may be some columns of such a tensor, or one row that is repeated.
    """
    if not (isinstance(x, Tensor) and x.is_meta and x.is_floating_point()):
        return False
    return x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1 and (x.stride(0) >= x.shape[1] or x.stride(0) == 0))


def unary(x: Tensor, *others: Any) -> Tensor | None:
    """Return the result of an elementwise operation on one tensor, or on tensors of the same shape.

    Args:
        x: First tensor, which determines the shape.
        *others: Further arguments.
    """
    return (
        x.new_empty(x.shape) if all(is_row_major_meta(other) for other in others if isinstance(other, Tensor)) else None
    )


def binary(x: Tensor, y: Any, *_: Any) -> Tensor | None:
    """Return the result of an elementwise operation on two tensors with broadcasting, or on a tensor and a number.

    Args:
        x: The tensor.
        y: Another tensor of the same type, or a number.
        *_: Further arguments.
    """
    if isinstance(y, float | int):
        return x.new_empty(x.shape)
    matches = is_row_major_meta(y) and x.dtype == y.dtype
    return x.new_empty(torch.broadcast_shapes(x.shape, y.shape)) if matches else None


def matmul(x: Tensor, y: Tensor) -> Tensor | None:
    """Return the product of two matrices, which is contiguous whatever their strides are.

    Args:
        x: [n, i].
        y: [i, o].
    """
    matches = x.is_meta and y.is_meta and x.dtype == y.dtype and x.dim() == y.dim() == 2 and x.shape[1] == y.shape[0]
    return x.new_empty(x.shape[0], y.shape[1]) if matches else None


def addmm(bias: Tensor, x: Tensor, weight: Tensor, *_: Any) -> Tensor | None:
    """Return the product of two matrices plus a bias, or plus a matrix.

    Args:
        bias: [o] or [n, o].
        x: [n, i].
        weight: [i, o].
        *_: Further arguments.
    """
    matches = bias.dtype == x.dtype and bias.shape[-1:] == weight.shape[1:]
    return matmul(x, weight) if matches else None


def block_diag(blocks: Sequence[Tensor]) -> Tensor | None:
    """Return the block-diagonal matrix of some matrices."""
    if any(block.dim() != 2 for block in blocks):
        return None
    return blocks[0].new_empty(*map(sum, zip(*(block.shape for block in blocks), strict=True)))


def cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    """Return the concatenation of tensors.

    Args:
        parts: The tensors.
        dim: Dimension along which they are concatenated.
    """
    if any(part.dim() != parts[0].dim() or part.dtype != parts[0].dtype for part in parts):
        return None
    shape = [*parts[0].shape]
    shape[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].new_empty(shape)


def stack(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return tensors of the same shape stacked along a new dimension.

    Args:
        parts: The tensors.
        dim: Position of the new dimension.
    """
    shape = [*parts[0].shape]
    shape.insert(dim % (len(shape) + 1), len(parts))
    return parts[0].new_empty(shape)


def reduction(x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False) -> Tensor | None:
    """Return the sum or mean along dimensions.

    Args:
        x: The tensor.
        dims: The dimensions; None or empty: all.
        keepdim: True keeps these dimensions, with size 1.
    """
    if x.dim() == 0:
        return None
    along = {dim % x.dim() for dim in dims or range(x.dim())}
    sizes = [1 if dim in along else size for dim, size in enumerate(x.shape) if keepdim or dim not in along]
    return x.new_empty(sizes)


IN_PLACE = {
    aten.add_.Tensor,
    aten.copy_.default,
    aten.index_add_.default,
    aten.index_copy_.default,
    aten.index_fill_.int_Scalar,
    aten.lerp_.Scalar,
    aten.zero_.default,
}
"""Operator overloads that change their first argument and return it."""
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
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), reduction),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor), binary),
}
"""Function for each operator overload that returns its result, or None to let PyTorch compute it."""
