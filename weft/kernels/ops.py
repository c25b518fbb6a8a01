"""The public kernels: they check what they are given, pick a backend by device, and know their gradients.

n targets, s sources, E edges, F columns, H heads. Gradients flow to x, h and logits; scales, weights and topology are
constants. Results have the same bits from run to run, whatever the number of threads.

Rows are float32 or float64; of `spmm`, `attend` and `keyed_dropout` also bfloat16: numbers are then summed in float32
and rounded once. Scales and edge weights are in the type of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.kernels import cpu, torch_sparse
from weft.kernels.argument_checks import (
    check_bounds,
    check_dropout,
    check_matrix,
    check_rows,
    check_square_start,
    check_steps,
    check_vector,
    checked_attention,
    checked_features,
    checked_loop,
)
from weft.kernels.autograd import (
    AttendEdgesFunction,
    AttendFunction,
    KeyedDropout,
    PairLogits,
    ReluDropout,
    SpmmFunction,
    SpmmMaxFunction,
)
from weft.kernels.backend import (
    Attention,
    AttentionInputs,
    Backend,
    EdgeDropout,
    EdgeFeatures,
    LogitGrads,
    Pairs,
    Scale,
    SourceGrads,
    SumBackend,
)
from weft.runtime.kernel_selection import chosen
from weft.utils.dtypes import is_narrow, sum_dtype
from weft.utils.errors import InputError
from weft.utils.optional_packages import install_command
from weft.utils.random import RandomKey, key_word

NO_TRITON = (
    "attention, maxima, dropout and bfloat16 on a GPU need Triton, which is not installed: "
    f"{install_command('gpu')}, or use --device cpu"
)
"""Text of the error for an operation that the GPU lacks a kernel for."""


def backend_of(x: Tensor) -> Backend:
    """Return the backend for operations on x: C++ on the CPU, Triton on a GPU.

    Raises:
        InputError: x is on a GPU, and Triton is not installed.
    """
    if x.device.type == "cpu":
        return cpu
    triton = triton_backend()
    if triton is None:
        raise InputError(NO_TRITON)
    return triton


def sum_backend_of(x: Tensor) -> SumBackend:
    """Return the backend for sums of the rows of x. On a GPU, it depends on their width, see `weft.runtime.kernel_selection`.

    Without Triton, PyTorch's sparse products compute sums on a GPU. They do not take bfloat16 rows.

    Raises:
        InputError: x has bfloat16 rows on a GPU, and Triton is not installed.
    """
    by_torch = x.is_cuda and not is_narrow(x.dtype)
    if by_torch and (triton_backend() is None or chosen("sum", x.shape[1]) == "torch_sparse"):
        return torch_sparse
    return backend_of(x)


def sum_backends() -> dict[str, SumBackend]:
    """Return the available backends for sums on a GPU by name, PyTorch's first."""
    triton = triton_backend()
    return {"torch_sparse": torch_sparse} | ({"triton": triton} if triton else {})


@cache
def triton_backend() -> Backend | None:
    """The kernels in Triton; None: it is not installed."""
    if find_spec("triton") is None:
        return None
    from weft.kernels import triton

    return triton


def spmm(
    adj: Adjacency,
    x: Tensor,
    *,
    scale: Scale = Scale(),  # noqa: B008
    weighted: bool = False,
    wide: bool = False,
) -> Tensor:
    """`y_v = target_v * sum_e w_e source_u x_u + loop_v x_v` over in-edges e = (u, v), x [s, F] -> y [n, F].

    w_e is the edge's weight if weighted, else 1. Zero where v has no in-edge (and no loop). wide: y is as it was
    summed, for whoever adds more to it.
    """
    check_rows("x", x, adj, adj.num_sources, narrow=True)
    check_vector("scale.source", scale.source, x, adj.num_sources)
    check_vector("scale.target", scale.target, x, adj.num_targets)
    check_vector("scale.loop", scale.loop, x, adj.num_targets)
    if scale.loop is not None:
        check_square_start("scale.loop", adj)
    if weighted:
        if adj.weight is None:
            raise ValueError("weighted=True, but the edges have no weight: give the Adjacency one")
        if adj.weight.dtype != sum_dtype(x.dtype):
            wanted = sum_dtype(x.dtype)
            raise ValueError(f"the edge weights are {adj.weight.dtype}, x is {x.dtype}: use adj.cast({wanted})")
        check_vector("weight", adj.weight, x, adj.num_edges)
    scale = Scale(*(None if vector is None else vector.contiguous() for vector in scale))
    y: Tensor = SpmmFunction.apply(x, sum_backend_of(x), adj, scale, weighted, wide)  # type: ignore[no-untyped-call]
    return y


def spmm_transposed(
    adj: Adjacency,
    grad_y: Tensor,
    *,
    scale: Scale = Scale(),  # noqa: B008
    weighted: bool = False,
    into: Tensor | None = None,
    wide: bool = False,
) -> Tensor:
    """The gradient [s, F] of spmm's x from that of its y [n, F], for whoever writes a backward pass of their own.

    into: contiguous [s, F], to which it is added; of the type of grad_y, or of its sums. wide: as of `spmm`.
    """
    check_rows("grad_y", grad_y, adj, adj.num_targets, narrow=True)
    if into is not None:
        check_rows("into", into, adj, adj.num_sources, narrow=True)
    return sum_backend_of(grad_y).spmm_transposed(adj, grad_y, scale, weighted, into, wide)


def spmm_max(adj: Adjacency, x: Tensor) -> Tensor:
    """`y_v = max x_u` over in-edges (u, v) by column, 0 where v has none; x [s, F] -> y [n, F].

    The gradient goes to one source: of equal ones, the lowest id.
    """
    return spmm_max_places(adj, x)[0]


def spmm_max_places(adj: Adjacency, x: Tensor) -> tuple[Tensor, Tensor]:
    """As `spmm_max`, and the place [n, F] of each maximum among the in-edges of its row, anything where v has none."""
    check_rows("x", x, adj, adj.num_sources)
    found: tuple[Tensor, Tensor] = SpmmMaxFunction.apply(x, backend_of(x), adj)  # type: ignore[no-untyped-call]
    return found


def attend(
    adj: Adjacency,
    h: Tensor,
    logit_src: Tensor,
    logit_dst: Tensor,
    *,
    bounds: Sequence[int],
    loop: Tensor | None = None,
    slope: float = 0.2,
    steps: int = 1,
    dropout: EdgeDropout | None = None,
) -> Tensor:
    """`y_v = sum_e alpha_e h_u`, alpha the softmax of `leaky_relu(logit_src_u + logit_dst_v)` over the in-edges of v.

    (Velickovic et al. 2018, eqs. 3 and 4.) Zero where v has no in-edge. With more steps, y = alpha y again by the same
    alpha.

    Args:
        h: [s, f]; head j owns columns bounds[j]:bounds[j + 1], which may be none: a rank may hold a slice that cuts
            heads, and the sum of the logits' gradients over all slices is that of the whole.
        logit_src, logit_dst: [s, H] and [n, H].
        loop: bool [n]; where true, v has one more edge, from itself. Targets must then be the first n sources.
        steps: more than one asks for n = s.
        dropout: of alpha, the same in all steps; the softmax knows nothing of it.
    """
    over = Attention(adj=adj, bounds=bounds, loop=loop, slope=slope, steps=steps, dropout=dropout)
    over = checked_attention(over, h, logit_src, logit_dst)
    needs_logits = torch.is_grad_enabled() and (logit_src.requires_grad or logit_dst.requires_grad)
    y: Tensor = AttendFunction.apply(h, logit_src, logit_dst, backend_of(h), over, needs_logits)  # type: ignore[no-untyped-call]
    return y


def attend_keeping(
    over: Attention, h: Tensor, logit_src: Tensor, logit_dst: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`attend` without autograd: y, and rows [n, .] that `attend_transposed` will want."""
    over = checked_attention(over, h, logit_src, logit_dst)
    inputs = (tensor.detach().contiguous() for tensor in (h, logit_src, logit_dst))
    return backend_of(h).attend(over, *inputs, needs_logits=True)


def attend_transposed(
    over: Attention,
    inputs: AttentionInputs,
    kept: Sequence[Tensor],
    grad_y: Tensor,
    into: SourceGrads = SourceGrads(),  # noqa: B008
) -> tuple[Tensor, LogitGrads]:
    """The gradients of attend's h and logits from that of its y [n, f], for whoever writes one themselves.

    kept: as `attend_keeping` gave it. into: contiguous, to which those of sources are added; those of logits are in the
    type of sums.
    """
    check_rows("grad_y", grad_y, over.adj, over.adj.num_targets, narrow=True)
    for name, rows in zip(("into.h", "into.logits"), into, strict=True):
        if rows is not None:
            check_rows(name, rows, over.adj, over.adj.num_sources, narrow=name == "into.h")
    grad_h, grads = backend_of(grad_y).attend_backward(
        over, inputs, kept, grad_y.contiguous(), needs_h=True, needs_logits=True, into=into
    )
    assert grad_h is not None
    assert grads is not None
    return grad_h, grads


def pair_logits(
    adj: Adjacency,
    left: Tensor,
    right: Tensor,
    attention: Tensor,
    edge_map: Tensor | None = None,
    *,
    bounds: Sequence[int],
    loop: Tensor | None = None,
    slope: float = 0.2,
    features: EdgeFeatures | None = None,
) -> Tensor:
    """Logits that need both ends of an edge e = (u, v), [E, H]: `attention . leaky_relu(left_u + right_v)` by head.

    (Brody et al. 2022, eq. 7.) With features, leaky_relu's argument has `features_e edge_map` besides. A rank may hold
    a slice of the columns that cuts heads; the sum over all slices is the whole's.

    Args:
        left, right: [s, W] and [n, W]; head j owns columns bounds[j]:bounds[j + 1]. attention: [W].
        edge_map: [K, W], of features [E, K], constant; neither or both.
        loop: bool [n]; where true, v has one more edge, from itself. The logits are then [E + n, H], those of the edges
            and then of the targets, 0 where v has no such edge; and features.loops [n, K] are asked for.
    """
    check_rows("left", left, adj, adj.num_sources)
    check_rows("right", right, adj, adj.num_targets)
    check_bounds(bounds, left.shape[1], len(bounds) - 1)
    if right.shape[1:] != left.shape[1:] or attention.shape != left.shape[1:]:
        found = f"{list(right.shape)} and {list(attention.shape)}"
        raise ValueError(f"right and attention ({found}) must have the {left.shape[1]} columns of left")
    if not left.dtype == right.dtype == attention.dtype:
        raise ValueError(f"left ({left.dtype}), right ({right.dtype}) and attention ({attention.dtype}) must agree")
    loop = checked_loop(loop, adj)
    if (features is None) != (edge_map is None):
        raise ValueError("edge_map and features go together: give both or neither")
    if features is not None and edge_map is not None:
        features = checked_features(features, edge_map, left, adj, loop)
    over = Pairs(adj=adj, bounds=bounds, loop=loop, slope=slope, features=features)
    logits: Tensor = PairLogits.apply(left, right, attention, edge_map, backend_of(left), over)  # type: ignore[no-untyped-call]
    return logits


def attend_edges(
    adj: Adjacency,
    h: Tensor,
    logits: Tensor,
    *,
    bounds: Sequence[int],
    loop: Tensor | None = None,
    steps: int = 1,
    dropout: EdgeDropout | None = None,
) -> Tensor:
    """`y_v = sum_e alpha_e h_u` as `attend`, alpha the softmax of given logits, as those of `pair_logits`."""
    check_rows("h", h, adj, adj.num_sources)
    loop = checked_loop(loop, adj)
    num_logits = adj.num_edges + (0 if loop is None else adj.num_targets)
    if logits.dim() != 2 or len(logits) != num_logits or logits.dtype != h.dtype:
        raise ValueError(f"logits ({logits.dtype} {list(logits.shape)}) must be {h.dtype} [{num_logits}, heads]")
    check_bounds(bounds, h.shape[1], logits.shape[1])
    check_steps(steps, adj)
    check_dropout(dropout, adj)
    over = Attention(adj=adj, bounds=bounds, loop=loop, slope=1.0, steps=steps, dropout=dropout)
    y: Tensor = AttendEdgesFunction.apply(h, logits, backend_of(h), over)  # type: ignore[no-untyped-call]
    return y


def keyed_dropout(
    x: Tensor, rows: Tensor, *, key: RandomKey, p: float, first_column: int = 0, relu: bool = False
) -> Tensor:
    """Dropout of x [n, F] that depends on (key, vertex, column) alone: `keep / (1 - p)`, or 0 with probability p.

    Args:
        rows: int64 [n], the global vertex of each row.
        key: 64 bits; as a tensor, int64 [1] on x's device, they are read when the kernel runs.
        first_column: the global column of x's first.
        relu: of `max(x, 0)`, in the same pass.
    """
    if not 0 <= p < 1:
        raise ValueError(f"p={p} must be in [0, 1)")
    check_matrix("x", x, "n", "F", narrow=True)
    if rows.dtype != torch.int64 or rows.shape != x.shape[:1]:
        raise ValueError(f"rows ({rows.dtype} {list(rows.shape)}) must be int64 [{x.shape[0]}], a vertex per row of x")
    if p == 0:
        return torch.relu(x) if relu else x
    dropout = ReluDropout if relu else KeyedDropout
    word = key_word(key)  # PyTorch's profiler, where it records shapes, takes no larger integer as an argument
    y: Tensor = dropout.apply(x, rows, backend_of(x), word, p, first_column)  # type: ignore[no-untyped-call]
    return y
