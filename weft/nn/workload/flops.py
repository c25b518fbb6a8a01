"""FLOPs of dense layers between a model's graph operations, counted as by PyTorch's FlopCounterMode."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.nn.layers.pyg_conv import PyGConv
from weft.nn.workload.layer_sizes import BlockSize
from weft.nn.workload.meta_shapes import meta_result
from weft.runtime.dispatch import DispatchMode
from weft.runtime.kernel_call import KernelCall

aten = torch.ops.aten


class FlopPosition(NamedTuple):
    """Position in a step at which FLOPs are counted."""

    segment: int = 0
    """Number of the graph operation that follows."""
    backward: bool = False
    """True in the backward pass."""


class DenseFlops(NamedTuple):
    """FLOPs and kernel calls of the dense layers between two graph operations of a model."""

    forward: int
    """FLOPs of the forward pass."""
    backward: int
    """FLOPs of the backward pass, for gradients of rows and of weights; 0 in an evaluation."""
    calls: tuple[KernelCall, ...] = ()
    """Kernel calls of the forward pass: products and elementwise passes over rows."""
    backward_calls: tuple[KernelCall, ...] = ()
    """Kernel calls of the backward pass."""


class FlopCounter(DispatchMode):
    """Context manager that counts the FLOPs of matrix products, and records kernel calls, by position."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.position: FlopPosition | None = FlopPosition()
        """Position at which operations are counted now; None: they are not counted."""
        self.flops: Counter[FlopPosition] = Counter()
        self.calls: defaultdict[FlopPosition, list[KernelCall]] = defaultdict(list)

    @property
    def total(self) -> int:
        """FLOPs at all positions."""
        return self.flops.total()

    @property
    def num_bytes(self) -> int:
        """Bytes that operations other than products read and write, at all positions."""
        calls = (call for kernel_calls in self.calls.values() for call in kernel_calls)
        return sum(call.sizes[0] * call.number for call in calls if call.kernel == "pass")

    def add(self, flops: int) -> None:
        """Count FLOPs at the current position."""
        if self.position is not None:
            self.flops[self.position] += flops

    def add_call(self, flops: int, num_bytes: int) -> None:
        """Count and record products and passes of which only totals are known.

        Args:
            flops: FLOPs of the products.
            num_bytes: Bytes that the other operations read and write.
        """
        self.add(flops)
        self.record("product", flops)
        self.record("pass", num_bytes)

    def record(self, kernel: str, *sizes: int, backward: bool = False) -> None:
        """Record a kernel call at the current position.

        Args:
            kernel: Name of the kernel.
            *sizes: Sizes of the call.
            backward: True to record it at the same position of the backward pass.
        """
        if self.position is not None:
            position = self.position._replace(backward=True) if backward else self.position
            self.calls[position].append(KernelCall(kernel, sizes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = PRODUCTS.get(func.overloadpacket)
        if product is not None:
            left, right = product(args)
            self.add(2 * left.numel() * right.shape[-1])
            self.record(*product_call(left, right))
        result = meta_result(func, args, kwargs or {})
        if result is None:
            result = func(*args, **(kwargs or {}))
        if product is None and not func.is_view and func.overloadpacket not in ALLOCATIONS:
            if func.overloadpacket in EXPONENTIALS:
                self.record("exponential", result.numel())
            else:
                self.record("pass", num_bytes(args) + num_bytes((result,)))
        return result


PRODUCTS: dict[Any, Callable[[Any], tuple[Tensor, Tensor]]] = {
    aten.mm: lambda args: (args[0], args[1]),
    aten.bmm: lambda args: (args[0], args[1]),
    aten.addmm: lambda args: (args[1], args[2]),
    aten.baddbmm: lambda args: (args[1], args[2]),
}
"""The two matrices, or stacks of them, that each kind of product multiplies."""

EXPONENTIALS = {
    aten.elu,
    aten.elu_backward,
    aten.exp,
    aten.gelu,
    aten.gelu_backward,
    aten.sigmoid,
    aten.silu,
    aten.silu_backward,
    aten.softplus,
    aten.tanh,
}
"""Elementwise operations whose time is not that of reading and writing their bytes."""
ALLOCATIONS = {aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided}
"""Operations that read and write nothing."""


def product_call(left: Tensor, right: Tensor) -> tuple[str, int, int, int]:
    """Return the kernel call of a product: a linear transform of rows, or the gradient of its weight.

    Args:
        left: Matrix, or a stack of matrices.
        right: Matrix, or a stack of matrices.
    """
    rows, inner, columns = left.numel() // left.shape[-1] if left.shape[-1] else 0, left.shape[-1], right.shape[-1]
    if (
        left.stride(-1) != 1 and left.stride(-2) == 1
    ):  # a transposed left side: a sum over rows, as in the gradient of a weight
        return "linear_weights", inner, rows, columns
    return "linear", rows, inner, columns


def num_bytes(values: Any) -> int:
    """Return the bytes of the tensors among some values, or in lists of these."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, list | tuple):
            total += num_bytes(value)
    return total


SMALL_SIZE = BlockSize(sources=6, targets=4, edges=5, loops=1)
"""Size of the block on which convolutions run to count their FLOPs."""


class BlockCost(NamedTuple):
    """Cost of a PyG convolution on a block."""

    forward: int
    """FLOPs of the forward pass."""
    backward: int
    """FLOPs of the backward pass."""
    forward_bytes: int
    """Bytes that operations other than products read and write in the forward pass."""
    backward_bytes: int
    """Bytes that operations other than products read and write in the backward pass."""


class BlockFlops(NamedTuple):
    """Cost of a PyG convolution as a linear function of the size of the block."""

    small: BlockCost
    """Cost on a block of `SMALL_SIZE`."""
    slopes: tuple[BlockCost, ...]
    """Additional cost for one more source, target, edge, and self-loop."""

    @classmethod
    def of(
        cls, conv: PyGConv, width: int, num_edge_features: int, *, weighted: bool, training: bool, gradient: bool
    ) -> BlockFlops:
        """Count the cost by running a convolution on small blocks, since it needs edges with values.

        Args:
            conv: The layer, which is not changed.
            width: Number of columns of the rows.
            num_edge_features: Number of edge features.
            weighted: True if edges have weights.
            training: True to count a training step, with its backward pass.
            gradient: True if the rows of the sources need a gradient.
        """
        conv = copy.deepcopy(conv).to("cpu").train(training)
        dtype = next((parameter.dtype for parameter in conv.parameters()), torch.float32)

        def run(size: BlockSize) -> BlockCost:
            counter = FlopCounter()
            with torch.device("cpu"), torch.set_grad_enabled(training), counter:
                x = torch.ones(size.sources, width, dtype=dtype, requires_grad=gradient)
                y = conv(SmallBlock(x, size, num_edge_features, weighted=weighted), x)
                forward, moved = counter.total, counter.num_bytes
                if y.requires_grad:
                    y.sum().backward()
            return BlockCost(forward, counter.total - forward, moved, counter.num_bytes - moved)

        small = run(SMALL_SIZE)
        more = [run(SMALL_SIZE._replace(**{name: getattr(SMALL_SIZE, name) + 1})) for name in SMALL_SIZE._fields]
        return cls(small, tuple(BlockCost(*(b - a for a, b in zip(small, cost, strict=True))) for cost in more))

    def on(self, size: BlockSize) -> BlockCost:
        """Return the cost on a block of the given size, extrapolated linearly from small blocks; at least 0."""
        steps = [actual - small_size for actual, small_size in zip(size, SMALL_SIZE, strict=True)]
        return BlockCost(
            *(
                max(0, small + sum(slope * step for slope, step in zip(slopes, steps, strict=True)))
                for small, slopes in zip(self.small, zip(*self.slopes, strict=True), strict=True)
            )
        )


class SmallBlock:
    """Minimal view for a PyG convolution: rows, and edges between the first sources.

    Args:
        x: Rows of the sources.
        size: Size of the block.
        num_edge_features: Number of edge features.
        weighted: True if edges have weights.
    """

    def __init__(self, x: Tensor, size: BlockSize, num_edge_features: int, *, weighted: bool) -> None:
        self.x, self.size = x, size
        loops = torch.arange(size.loops) % size.targets
        others = torch.arange(size.edges - size.loops) % size.targets
        self.edge_index = torch.stack([torch.cat([loops, (others + 1) % size.targets]), torch.cat([loops, others])])
        self.edge_features = x.new_ones(size.edges, num_edge_features) if num_edge_features else None
        self.edge_weight = x.new_ones(size.edges) if weighted else None

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return (source rows, edge_index, number of targets)."""
        return x, self.edge_index, self.size.targets


class CountedConv(torch.autograd.Function):
    """Function on meta tensors that counts a convolution of known cost: returns rows [n, F] with gradients.

    Its arguments are the counter, the cost, the shape of the result, and the tensors that the convolution reads.
    """

    @staticmethod
    def forward(ctx: Any, counter: FlopCounter, cost: BlockCost, shape: tuple[int, int], *read: Tensor) -> Tensor:
        ctx.counter, ctx.cost, ctx.like = counter, cost, [(tensor.shape, tensor.dtype) for tensor in read]
        counter.add_call(cost.forward, cost.forward_bytes)
        return read[0].new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        ctx.counter.add_call(ctx.cost.backward, ctx.cost.backward_bytes)
        return None, None, None, *(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.like)
