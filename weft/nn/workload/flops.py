"""Counts the floating-point operations of dense maps, as PyTorch's FlopCounterMode does, by place in a model."""

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
    """Where in a run flops are counted: before which of the model's graph operations, and in which direction."""

    segment: int = 0
    backward: bool = False


class DenseFlops(NamedTuple):
    """Those of the maps between two graph operations of a model."""

    forward: int
    backward: int
    """By rows and by weights; of an evaluation none."""
    calls: tuple[KernelCall, ...] = ()
    """What runs forward between the two, maps and passes over rows."""
    backward_calls: tuple[KernelCall, ...] = ()


class FlopCounter(DispatchMode):
    """Counts the flops of matrix products that run inside, by place, and notes the calls of kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place: FlopPosition | None = FlopPosition()
        """None: what runs now is not counted."""
        self.found: Counter[FlopPosition] = Counter()
        self.calls: defaultdict[FlopPosition, list[KernelCall]] = defaultdict(list)

    @property
    def total(self) -> int:
        """Those of all places."""
        return self.found.total()

    @property
    def num_bytes(self) -> int:
        """Read and written beside products, wherever."""
        calls = (call for found in self.calls.values() for call in found)
        return sum(call.sizes[0] * call.number for call in calls if call.kernel == "pass")

    def add(self, flops: int) -> None:
        """Counts so many at the present place."""
        if self.place is not None:
            self.found[self.place] += flops

    def done(self, flops: int, num_bytes: int) -> None:
        """Counts and notes products and passes of which no more is known."""
        self.add(flops)
        self.note("product", flops)
        self.note("pass", num_bytes)

    def note(self, kernel: str, *sizes: int, backward: bool = False) -> None:
        """Notes a call at the present place. backward: where the backward pass comes by it."""
        if self.place is not None:
            place = self.place._replace(backward=True) if backward else self.place
            self.calls[place].append(KernelCall(kernel, sizes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = PRODUCTS.get(func.overloadpacket)
        if product is not None:
            left, right = product(args)
            self.add(2 * left.numel() * right.shape[-1])
            self.note(*product_call(left, right))
        result = meta_result(func, args, kwargs or {})
        if result is None:
            result = func(*args, **(kwargs or {}))
        if product is None and not func.is_view and func.overloadpacket not in ALLOCATIONS:
            if func.overloadpacket in EXPONENTIALS:
                self.note("exponential", result.numel())
            else:
                self.note("pass", num_bytes(args) + num_bytes((result,)))
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
"""Passes that take longer than their bytes."""
ALLOCATIONS = {aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided}
"""What moves nothing."""


def product_call(left: Tensor, right: Tensor) -> tuple[str, int, int, int]:
    """The call that multiplies two matrices, or stacks of them: a map of rows, or the gradient of its weights."""
    rows, inner, columns = left.numel() // left.shape[-1] if left.shape[-1] else 0, left.shape[-1], right.shape[-1]
    if left.stride(-1) != 1 and left.stride(-2) == 1:  # rows that stand across are summed over
        return "linear_weights", inner, rows, columns
    return "linear", rows, inner, columns


def num_bytes(values: Any) -> int:
    """Those of the tensors among some values, or lists of them."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, list | tuple):
            total += num_bytes(value)
    return total


SMALL = BlockSize(sources=6, targets=4, edges=5, loops=1)


class BlockCost(NamedTuple):
    """What a PyG convolution on a block takes."""

    forward: int
    """Flops."""
    backward: int
    forward_bytes: int
    """Read and written beside its products."""
    backward_bytes: int


class BlockFlops(NamedTuple):
    """The flops of a PyG convolution on a block: linear in each of the block's sizes."""

    small: BlockCost
    """On the block SMALL."""
    slopes: tuple[BlockCost, ...]
    """For one more of each of its sizes."""

    @classmethod
    def of(
        cls, conv: PyGConv, width: int, num_edge_features: int, *, weighted: bool, training: bool, gradient: bool
    ) -> BlockFlops:
        """Found by running it on a few small blocks, since it looks at the edges' values, and needs some.

        gradient: whether the rows of its sources want one.
        """
        conv = copy.deepcopy(conv).to("cpu").train(training)
        dtype = next((one.dtype for one in conv.parameters()), torch.float32)

        def run(size: BlockSize) -> BlockCost:
            counter = FlopCounter()
            with torch.device("cpu"), torch.set_grad_enabled(training), counter:
                x = torch.ones(size.sources, width, dtype=dtype, requires_grad=gradient)
                y = conv(SmallBlock(x, size, num_edge_features, weighted=weighted), x)
                forward, moved = counter.total, counter.num_bytes
                if y.requires_grad:
                    y.sum().backward()
            return BlockCost(forward, counter.total - forward, moved, counter.num_bytes - moved)

        small = run(SMALL)
        more = [run(SMALL._replace(**{name: getattr(SMALL, name) + 1})) for name in SMALL._fields]
        return cls(small, tuple(BlockCost(*(b - a for a, b in zip(small, one, strict=True))) for one in more))

    def on(self, size: BlockSize) -> BlockCost:
        """Return the cost on a block of this size, extrapolated from small ones; bytes are never fewer than none."""
        steps = [here - there for here, there in zip(size, SMALL, strict=True)]
        return BlockCost(
            *(
                max(0, small + sum(slope * step for slope, step in zip(slopes, steps, strict=True)))
                for small, slopes in zip(self.small, zip(*self.slopes, strict=True), strict=True)
            )
        )


class SmallBlock:
    """As much of a view as a PyG convolution asks for: rows, and edges between the first sources."""

    def __init__(self, x: Tensor, size: BlockSize, num_edge_features: int, *, weighted: bool) -> None:
        self.x, self.size = x, size
        loops = torch.arange(size.loops) % size.targets
        others = torch.arange(size.edges - size.loops) % size.targets
        self.edge_index = torch.stack([torch.cat([loops, (others + 1) % size.targets]), torch.cat([loops, others])])
        self.edge_features = x.new_ones(size.edges, num_edge_features) if num_edge_features else None
        self.edge_weight = x.new_ones(size.edges) if weighted else None

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """The block."""
        return x, self.edge_index, self.size.targets


class CountedConv(torch.autograd.Function):
    """The result [n, F], without data, of a convolution whose flops are known, and gradients to all that it read."""

    @staticmethod
    def forward(ctx: Any, counter: FlopCounter, cost: BlockCost, shape: tuple[int, int], *read: Tensor) -> Tensor:
        ctx.counter, ctx.cost, ctx.like = counter, cost, [(one.shape, one.dtype) for one in read]
        counter.done(cost.forward, cost.forward_bytes)
        return read[0].new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        ctx.counter.done(ctx.cost.backward, ctx.cost.backward_bytes)
        return None, None, None, *(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.like)
