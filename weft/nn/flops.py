"""Counts the floating-point operations of dense maps, as PyTorch's FlopCounterMode does, by place in a model."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.nn.levels import BlockSize
from weft.nn.pyg import PyGConv
from weft.nn.shapes import shaped

aten = torch.ops.aten


class Place(NamedTuple):
    """Where in a run flops are counted: before which of the model's graph operations, and in which direction."""

    segment: int = 0
    backward: bool = False


class MapFlops(NamedTuple):
    """Those of the maps between two graph operations of a model."""

    forward: int
    backward: int
    """By rows and by weights; of an evaluation none."""


class FlopCounter(TorchDispatchMode):
    """Counts the flops of matrix products that run inside, by place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place: Place | None = Place()
        """None: what runs now is not counted."""
        self.found: Counter[Place] = Counter()

    @property
    def total(self) -> int:
        """Those of all places."""
        return self.found.total()

    def add(self, flops: int) -> None:
        """Counts so many at the present place."""
        if self.place is not None:
            self.found[self.place] += flops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (product := PRODUCTS.get(func.overloadpacket)) is not None:
            left, right = product(args)
            self.add(2 * left.numel() * right.shape[-1])
        result = shaped(func, args)
        return func(*args, **(kwargs or {})) if result is None else result


PRODUCTS: dict[Any, Callable[[Any], tuple[Tensor, Tensor]]] = {
    aten.mm: lambda args: (args[0], args[1]),
    aten.bmm: lambda args: (args[0], args[1]),
    aten.addmm: lambda args: (args[1], args[2]),
    aten.baddbmm: lambda args: (args[1], args[2]),
}
"""The two matrices, or stacks of them, that each kind of product multiplies."""

SMALL = BlockSize(sources=6, targets=4, edges=5, loops=1)


Both = tuple[int, int]
"""Flops forward and backward."""


class BlockFlops(NamedTuple):
    """The flops of a PyG convolution on a block: linear in each of the block's sizes."""

    small: Both
    """On the block SMALL."""
    slopes: tuple[Both, ...]
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

        def run(size: BlockSize) -> Both:
            counter = FlopCounter()
            with torch.device("cpu"), torch.set_grad_enabled(training), counter:
                x = torch.ones(size.sources, width, dtype=dtype, requires_grad=gradient)
                y = conv(SmallBlock(x, size, num_edge_features, weighted=weighted), x)
                forward = counter.total
                if y.requires_grad:
                    y.sum().backward()
            return forward, counter.total - forward

        small = run(SMALL)
        more = [run(SMALL._replace(**{name: getattr(SMALL, name) + 1})) for name in SMALL._fields]
        return cls(small, tuple((forward - small[0], backward - small[1]) for forward, backward in more))

    def on(self, size: BlockSize) -> Both:
        """Those on a block of this size."""
        steps = [here - there for here, there in zip(size, SMALL, strict=True)]
        forward, backward = (
            small + sum(slope * step for slope, step in zip(slopes, steps, strict=True))
            for small, slopes in zip(self.small, zip(*self.slopes, strict=True), strict=True)
        )
        return forward, backward


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
    def forward(
        ctx: Any, counter: FlopCounter, flops: tuple[int, int], shape: tuple[int, int], *read: Tensor
    ) -> Tensor:
        ctx.counter, ctx.flops, ctx.like = counter, flops[1], [(one.shape, one.dtype) for one in read]
        counter.add(flops[0])
        return read[0].new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        ctx.counter.add(ctx.flops)
        return None, None, None, *(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.like)
