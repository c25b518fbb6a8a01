"""FLOPs of dense layers between graph operations, counted as by PyTorch's FlopCounterMode; costs of PyG layers."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from weft.data import Adjacency
from weft.nn.aggregate.attention import MaskKey
from weft.nn.aggregate.typed_block import RelationEdges
from weft.nn.convert.unconverted import WholeModel
from weft.nn.layers.pyg_conv import PyGConv
from weft.nn.sparse_rows import SparseRows
from weft.nn.workload.layer_sizes import BlockSize
from weft.nn.workload.meta_shapes import meta_result
from weft.runtime.dispatch import DispatchMode
from weft.runtime.kernel_call import KernelCall, TileSizes, work_counters
from weft.runtime.memory.tensor_peak import TensorPeak, blank

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

    def __enter__(self) -> FlopCounter:
        work_counters.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        work_counters.remove(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @property
    def total(self) -> int:
        """FLOPs at all positions."""
        return self.flops.total()

    @property
    def pass_bytes(self) -> int:
        """Bytes that elementwise passes read and write, at all positions."""
        return sum(num_bytes for (num_bytes,) in self._sizes("pass"))

    @property
    def tiles(self) -> TileSizes:
        """Sizes of the runs of programs in tiles of edges, summed over all positions."""
        return TileSizes(*map(sum, zip((0, 0, 0), *self._sizes("tiles"), strict=True)))

    def _sizes(self, kernel: str) -> list[tuple[int, ...]]:
        return [call.sizes for calls in self.calls.values() for call in calls if call.kernel == kernel]

    def add(self, flops: int) -> None:
        """Count FLOPs at the current position."""
        if self.position is not None:
            self.flops[self.position] += flops

    def add_tiles(self, flops: int, tiles: TileSizes) -> None:
        self.add(flops)
        self.record("product", flops)
        if tiles.num_bytes:  # a call has a price of its own
            self.record("tiles", *tiles)

    def add_sparse(self, x: SparseRows, width: int) -> None:
        """Record a linear transform of constant rows by their nonzeros; only its weight has a gradient.

        Args:
            x: The rows.
            width: Number of columns of the result.
        """
        sizes = x.num_nonzeros, *x.shape, width
        self.record("sparse", *sizes)
        self.record("sparse_backward", *sizes, backward=True)

    def add_block(self, flops: int, num_bytes: int, tiles: TileSizes) -> None:
        """Count and record the products and passes of a convolution, of which only totals are known.

        Args:
            flops: FLOPs of the products.
            num_bytes: Bytes that other operations read and write.
            tiles: Sizes of the runs of programs in tiles of edges, summed.
        """
        self.add_tiles(flops, tiles)
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


class RowKind(NamedTuple):
    """Properties of rows on which the cost of a convolution that reads them depends."""

    width: int
    """Number of columns."""
    gradient: bool
    """True if the rows need a gradient."""
    is_sparse: bool
    """True if linear transforms read only their nonzeros."""

    @classmethod
    def of(cls, x: Tensor) -> RowKind:
        """Return the properties of rows x [n, F]."""
        return cls(x.shape[1], x.requires_grad, isinstance(x, SparseRows))

    def make(self, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Return some rows with these properties.

        Args:
            num_rows: Number of rows.
            dtype: Type of the rows.
        """
        x = torch.ones(num_rows, self.width, dtype=dtype, requires_grad=self.gradient)
        rows = SparseRows.of(x, 0.0 if self.is_sparse else 1.0)
        if isinstance(rows, SparseRows):
            _ = rows.nonzeros.transpose  # computed before the step, and kept
        return rows


SMALL_SIZE = BlockSize(sources=6, targets=4, edges=5, loops=1)
"""Size of the block on which convolutions run to count their FLOPs."""
SMALL_SIZE_WITHOUT_EDGES = SMALL_SIZE[:2]
"""Sources and targets of a block without edges, on which convolutions save less than other blocks would suggest."""


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
    forward_tiles: TileSizes
    """Sizes of the runs of programs in tiles of edges in the forward pass, summed."""
    backward_tiles: TileSizes
    """Sizes of the runs of programs in tiles of edges in the backward pass, summed."""
    saved: int
    """Bytes of tensors that the forward pass leaves for the backward pass, without the result."""
    forward_peak: int
    """Peak bytes of tensors in the forward pass, with the result."""
    backward_peak: int
    """Peak bytes of tensors in the backward pass, with those that are saved, without the result and the sources."""
    backward_peak_alone: int
    """Peak bytes with the rows of the sources as well, for as long as the convolution needs them."""
    keeps_sources: bool
    """True if the rows of the sources are saved for the backward pass."""


class BlockCostModel(NamedTuple):
    """Cost of a PyG convolution as a linear function of the size of the block.

    The bytes in use are linear at each moment, so their peak is the largest of many linear functions.
    """

    counts: np.ndarray[Any, Any]
    """FLOPs of both passes, bytes of both, `TileSizes` of both, and saved bytes, int64 [11, 1 + sizes].

    Columns: on a block of the size `small`; more for one more of each number in it, such as sources or edges.
    """
    forward_moments: np.ndarray[Any, Any]
    """Bytes in use after each operation of the forward pass, int64 [moments, 1 + sizes]."""
    backward_moments: np.ndarray[Any, Any]
    """Bytes in use after each operation of the backward pass, int64 [moments, 1 + sizes]."""
    backward_moments_alone: np.ndarray[Any, Any]
    """Bytes with the rows of the sources as well, for as long as the convolution needs them."""
    keeps_sources: bool
    """True if the rows of the sources are saved for the backward pass."""
    small: tuple[int, ...]
    """Size of the smallest block."""
    products: tuple[tuple[int, ...], ...]
    """Number of columns of each linear transform by nonzeros, for the rows of the sources or of each type, and those of
    the targets."""

    @classmethod
    def of(
        cls,
        conv: PyGConv | WholeModel,
        rows: Sequence[RowKind],
        make_block: Callable[..., Any],
        small: tuple[int, ...],
        *,
        training: bool,
    ) -> BlockCostModel:
        """Count the cost by running a convolution on small blocks, since it needs edges with values.

        Args:
            conv: The layer, which is not changed.
            rows: Properties of the rows of the sources, or of those of each type.
            make_block: Returns a block, from its size and the type of its tensors, `dtype`.
            small: Size of the smallest block. For each number in it, the convolution also runs on a larger block.
            training: True to count a training step, with its backward pass.
        """
        conv = copy.deepcopy(conv).to("cpu").train(training)
        dtype = next((parameter.dtype for parameter in conv.parameters()), torch.float32)
        products: tuple[list[int], ...] = ()

        def run(size: tuple[int, ...]) -> list[tuple[list[int], list[int], list[int]]]:
            """Return the counts and moments on a block: without the rows of the sources, and with them."""
            nonlocal products
            counter, peaks = FlopCounter(), (TensorPeak(), TensorPeak())

            def marks() -> list[tuple[int, int]]:
                return [(len(peak.moments), peak.alive) for peak in peaks]

            with torch.device("cpu"):
                block = make_block(size, dtype=dtype)
                leaves = [kind.make(count, dtype) for kind, count in zip(rows, block.num_rows, strict=True)]
                read = (*leaves, getattr(block, "target_rows", None))
                products = record_products(read)
                with torch.set_grad_enabled(training):
                    conv(block, *leaves)  # what a first call keeps for all others is not part of a step
            record_products(read)  # into other lists from now on: `products` are those of one run
            conv.zero_grad()
            with torch.set_grad_enabled(training), peaks[1]:
                sources = [leaf if isinstance(leaf, SparseRows) else leaf * 1 for leaf in leaves]
            with torch.device("cpu"), torch.set_grad_enabled(training), counter, peaks[0], peaks[1]:
                starts = marks()
                y = conv(block, *sources)
                forward, moved, tiles, ends = counter.total, counter.pass_bytes, counter.tiles, marks()
                del sources
                left = marks()
            with torch.device("cpu"), torch.set_grad_enabled(training), counter, peaks[0], peaks[1]:
                scaled = y * 1  # so that the gradient of y is freed as soon as it has been read
                before, begins = counter.pass_bytes, marks()
                if y.requires_grad:
                    scaled.backward(torch.ones_like(scaled))
            backward_moved = max(counter.pass_bytes - before - 3 * y.nbytes, 0)  # without those of `scaled`
            backward_tiles = [both - each for both, each in zip(counter.tiles, tiles, strict=True)]
            counts = [forward, counter.total - forward, moved, backward_moved, *tiles, *backward_tiles]
            results = []
            for peak, (start, of_sources), (end, _), (_, saved), (begin, _) in zip(
                peaks, starts, ends, left, begins, strict=True
            ):
                forward_moments = [alive - of_sources for alive in peak.moments[start:end]]
                # The result and its gradient belong to the caller; next to them are `scaled` and its gradient.
                backward_moments = [alive - 4 * y.nbytes for alive in peak.moments[begin:]]
                results.append(([*counts, saved - of_sources - y.nbytes], forward_moments, backward_moments or [0]))
            return results

        sizes = [(*small[:number], small[number] + 1, *small[number + 1 :]) for number in range(len(small))]
        without, alone = (
            [_linear(values) for values in zip(*results, strict=True)]
            for results in zip(*map(run, (small, *sizes)), strict=True)
        )
        keeps_sources = bool((without[0][-1] == alone[0][-1]).all())  # as many saved bytes without the rows of sources
        counts, forward_moments, backward_moments = without
        widths = tuple(map(tuple, products))
        return cls(counts, forward_moments, backward_moments, alone[-1], keeps_sources, small, widths)

    def on(self, size: tuple[int, ...]) -> BlockCost:
        """Return the cost on a block, extrapolated linearly from small blocks; at least 0.

        Args:
            size: Size of the block. Numbers that `small` lacks are 0.
        """
        moments = (self.forward_moments, self.backward_moments, self.backward_moments_alone)
        more = np.array([1, *(actual - smallest for actual, smallest in zip(size, self.small, strict=False))])
        counts = *(self.counts @ more), *((each @ more).max() for each in moments)
        numbers = [max(0, int(number)) for number in counts]
        tiles = TileSizes(*numbers[4:7]), TileSizes(*numbers[7:10])
        return BlockCost._make([*numbers[:4], *tiles, *numbers[10:], self.keeps_sources])


def record_products(read: Sequence[Tensor | None]) -> tuple[list[int], ...]:
    """Return lists that receive the number of columns of each linear transform by nonzeros, for each of some rows."""
    lists = tuple(list[int]() for _ in read)
    for x, widths in zip(read, lists, strict=True):
        if isinstance(x, SparseRows):
            x.on_product = lambda _, width, widths=widths: widths.append(width)
    return lists


def _linear(values: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
    """Return the linear functions through values at a size, and at sizes with one item more: [k, sizes].

    If their number depends on the size, only the largest value counts.

    Args:
        values: The k values at each size.
    """
    if len({len(each) for each in values}) > 1:
        values = [[max(each)] for each in values]
    table = np.array(values, dtype=np.int64).T
    table[:, 1:] -= table[:, :1]
    return table


class SmallBlock:
    """Minimal view for a PyG convolution: rows, and edges between the first sources.

    Args:
        size: Size of the block, as in `BlockSize`; of two numbers, the block has no edges.
        num_edge_features: Number of edge features.
        weighted: True if edges have weights.
        dtype: Type of the features and weights.
        target_rows: Properties of separate rows of the targets, for a `RelationConv`; None: there are none.
    """

    def __init__(
        self,
        size: tuple[int, ...],
        num_edge_features: int,
        *,
        weighted: bool,
        dtype: torch.dtype,
        target_rows: RowKind | None = None,
    ) -> None:
        size = BlockSize(*size)
        self.num_rows, self._num_targets = (size.sources,), size.targets
        self.target_rows = target_rows and target_rows.make(size.targets, dtype)
        loops = torch.arange(size.loops) % size.targets
        others = torch.arange(size.edges - size.loops) % size.targets
        edge_index = torch.stack([torch.cat([loops, (others + 1) % size.targets]), torch.cat([loops, others])])
        self.edges = RelationEdges(edge_index[:, edge_index[1].argsort(stable=True)])  # by target, as in a graph
        self.edge_features = torch.ones(size.edges, num_edge_features, dtype=dtype) if num_edge_features else None
        self.edge_weight = torch.ones(size.edges, dtype=dtype) if weighted else None
        self.edge_type = torch.zeros(size.edges, dtype=torch.int64)

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return (source rows, edge_index, number of targets)."""
        return x, self.edges.index, self._num_targets

    def mask_key(self, p: float) -> MaskKey:
        """Return the key of a dropout mask, for a `WholeModel`."""
        return MaskKey(p, 0)

    def adjacency(self, num_sources: int) -> Adjacency:
        """Return the edges in compressed rows, for a `RelationConv`."""
        return self.edges.adjacency(num_sources, self._num_targets)


class CountedConv(torch.autograd.Function):
    """Function on meta tensors that counts a convolution of known cost: returns rows [n, F] with gradients.

    Its arguments are the counter, the cost, the shape of the result, and the tensors that the convolution reads, of
    which the first `num_sources` are the rows of sources.
    """

    @staticmethod
    def forward(
        ctx: Any, counter: FlopCounter, cost: BlockCost, shape: tuple[int, int], num_sources: int, *read: Tensor
    ) -> Tensor:
        ctx.counter, ctx.cost, ctx.like = counter, cost, [(tensor.shape, tensor.dtype) for tensor in read]
        counter.add_block(cost.forward, cost.forward_bytes, cost.forward_tiles)
        result = read[0].new_empty(shape)
        blank(cost.forward_peak - result.nbytes)
        ctx.saved = [blank(cost.saved)]
        ctx.sources = read[:num_sources] if cost.keeps_sources else ()
        return result

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        cost = ctx.cost
        ctx.counter.add_block(cost.backward, cost.backward_bytes, cost.backward_tiles)
        ctx.saved.clear()
        storages = [StorageWeakRef(rows.untyped_storage()) for rows in ctx.sources]
        ctx.sources = ()
        alone = storages and all(storage.expired() for storage in storages)
        blank(cost.backward_peak_alone if alone else cost.backward_peak)
        needed = zip(ctx.like, ctx.needs_input_grad[4:], strict=True)
        grads = [torch.empty(shape, dtype=dtype, device="meta") if needs else None for (shape, dtype), needs in needed]
        return None, None, None, None, *grads
