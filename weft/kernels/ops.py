"""Public functions of the kernels: they check their arguments, select a backend by device, and are differentiable.

Shapes: n targets, s sources, E edges, F columns, f columns of this rank, H heads, K edge features. Rows, logits and the
attention parameters get gradients; scales, edge weights and topology are constants. Results are bitwise reproducible,
whatever the number of threads.

Rows are float32 or float64; for `spmm`, `attend` and `keyed_dropout` also bfloat16, which is summed in float32 and
rounded once. Scales and edge weights have the dtype of the sums.
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
    DotLogits,
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
from weft.runtime.kernel_selection import selected_kernel
from weft.utils.dtypes import is_low_precision, sum_dtype
from weft.utils.errors import InputError
from weft.utils.optional_packages import install_command
from weft.utils.random import RandomKey, key_word

NO_TRITON = (
    "attention, maxima, dropout and bfloat16 on a GPU need Triton, which is not installed: "
    f"{install_command('gpu')}, or use --device cpu"
)
"""Error text for an operation that needs Triton on a GPU."""


def backend_of(x: Tensor) -> Backend:
    """Return the backend for operations on x: C++ on the CPU, Triton on a GPU. Meta tensors have that of the CPU.

    Raises:
        InputError: x is on a GPU, and Triton is not installed.
    """
    if x.device.type in ("cpu", "meta"):
        return cpu
    triton = triton_backend()
    if triton is None:
        raise InputError(NO_TRITON)
    return triton


def sum_backend_of(x: Tensor) -> SumBackend:
    """Return the backend for sums of the rows of x.

    On a GPU, it depends on the number of columns (`weft.runtime.kernel_selection`). Without Triton, PyTorch's sparse
    products compute sums on a GPU; they do not support bfloat16 rows.

    Raises:
        InputError: x has bfloat16 rows on a GPU, and Triton is not installed.
    """
    by_torch = x.is_cuda and not is_low_precision(x.dtype)
    if by_torch and (triton_backend() is None or selected_kernel("sum", x.shape[1]) == "torch_sparse"):
        return torch_sparse
    return backend_of(x)


def sum_backends() -> dict[str, SumBackend]:
    """Return the available backends for sums on a GPU by name, PyTorch's first."""
    triton = triton_backend()
    return {"torch_sparse": torch_sparse} | ({"triton": triton} if triton else {})


@cache
def triton_backend() -> Backend | None:
    """Return the Triton backend, or None if Triton is not installed."""
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
    in_sum_dtype: bool = False,
) -> Tensor:
    """Return scaled sums over in-edges: `y_v = target_v * sum_e w_e source_u x_u + loop_v x_v`, [n, F].

    The sum is over the in-edges e = (u, v) of v. source, target and loop are the vectors of `scale`, and w_e is the
    weight of the edge. y_v is 0 if v has no in-edge and no self-loop.

    Args:
        adj: The edges.
        x: Source rows, [s, F].
        scale: Constant factors, 1 (source, target) and 0 (loop) by default.
        weighted: True to multiply by the edge weights; False for w_e = 1.
        in_sum_dtype: True for a result in the dtype of sums (float32 for bfloat16 rows), to which more can be added
            without rounding; False for a result in the dtype of x.
    """
    check_rows("x", x, adj, adj.num_sources, low_precision=True)
    check_vector("scale.source", scale.source, x, adj.num_sources)
    check_vector("scale.target", scale.target, x, adj.num_targets)
    check_vector("scale.loop", scale.loop, x, adj.num_targets)
    if scale.loop is not None:
        check_square_start("scale.loop", adj)
    if weighted:
        if adj.weight is None:
            raise ValueError("weighted=True, but the edges have no weights: create the Adjacency with weights")
        if adj.weight.dtype != sum_dtype(x.dtype):
            expected = sum_dtype(x.dtype)
            raise ValueError(f"the edge weights are {adj.weight.dtype}, x is {x.dtype}: use adj.cast({expected})")
        check_vector("weight", adj.weight, x, adj.num_edges)
    scale = Scale(*(None if vector is None else vector.contiguous() for vector in scale))
    y: Tensor = SpmmFunction.apply(x, sum_backend_of(x), adj, scale, weighted, in_sum_dtype)  # type: ignore[no-untyped-call]
    return y


def spmm_transposed(
    adj: Adjacency,
    grad_y: Tensor,
    *,
    scale: Scale = Scale(),  # noqa: B008
    weighted: bool = False,
    into: Tensor | None = None,
    in_sum_dtype: bool = False,
) -> Tensor:
    """Return the gradient of the x of `spmm`, [s, F], for hand-written backward passes.

    Args:
        adj: The edges.
        grad_y: Gradient of the result of `spmm`, [n, F].
        scale: As for `spmm`.
        weighted: As for `spmm`.
        into: Contiguous tensor [s, F] to which the gradient is added, and which is returned; in the dtype of grad_y or
            of its sums. None: a new tensor.
        in_sum_dtype: As for `spmm`, if `into` is None.
    """
    check_rows("grad_y", grad_y, adj, adj.num_targets, low_precision=True)
    if into is not None:
        check_rows("into", into, adj, adj.num_sources, low_precision=True)
    return sum_backend_of(grad_y).spmm_transposed(adj, grad_y, scale, weighted, into, in_sum_dtype)


def spmm_max(adj: Adjacency, x: Tensor) -> Tensor:
    """Return the maximum of each column over in-edges, `y_v = max x_u`, [n, F]; 0 if v has no in-edge.

    The gradient goes to one source only: among equal ones, to that with the lowest id.

    Args:
        adj: The edges.
        x: Source rows, [s, F].
    """
    return spmm_max_positions(adj, x)[0]


def spmm_max_positions(adj: Adjacency, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of `spmm_max`, and the position of each maximum among the in-edges of its row, both [n, F].

    A position is undefined if v has no in-edge.

    Args:
        adj: The edges.
        x: Source rows, [s, F].
    """
    check_rows("x", x, adj, adj.num_sources)
    maxima: tuple[Tensor, Tensor] = SpmmMaxFunction.apply(x, backend_of(x), adj)  # type: ignore[no-untyped-call]
    return maxima


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
    """Return the result of GAT's attention, `y_v = sum_e alpha_e h_u`, [n, f] (Velickovic et al. 2018, eqs. 3 and 4).

    alpha_e is the softmax of `leaky_relu(logit_src_u + logit_dst_v)` over the in-edges e = (u, v) of v. y_v is 0 if v
    has no in-edge.

    Args:
        adj: The edges.
        h: Source rows, [s, f]. A rank may have any slice of the columns, also one that cuts a head; the logits'
            gradients summed over all slices are those for all columns.
        logit_src: Logits of sources, [s, H].
        logit_dst: Logits of targets, [n, H].
        bounds: Column range of each head: head j has columns `bounds[j]:bounds[j + 1]` of h, possibly none.
        loop: Mask of targets that get a self-loop in addition to their edges, bool [n]. Targets must then be the first
            n sources.
        slope: Negative slope of leaky_relu.
        steps: Number of times that y = alpha y is applied with the same alpha; more than 1 needs n = s.
        dropout: Dropout of alpha, after the softmax and the same in all steps.
    """
    spec = Attention(adj=adj, bounds=bounds, loop=loop, slope=slope, steps=steps, dropout=dropout)
    spec = checked_attention(spec, h, logit_src, logit_dst)
    needs_logits = torch.is_grad_enabled() and (logit_src.requires_grad or logit_dst.requires_grad)
    y: Tensor = AttendFunction.apply(h, logit_src, logit_dst, backend_of(h), spec, needs_logits)  # type: ignore[no-untyped-call]
    return y


def attend_and_save(
    spec: Attention, h: Tensor, logit_src: Tensor, logit_dst: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the result of `attend` without autograd, and tensors [n, .] for `attend_backward`.

    Args:
        spec: Edges, heads and options.
        h: Source rows, [s, f].
        logit_src: Logits of sources, [s, H].
        logit_dst: Logits of targets, [n, H].
    """
    spec = checked_attention(spec, h, logit_src, logit_dst)
    inputs = (tensor.detach().contiguous() for tensor in (h, logit_src, logit_dst))
    return backend_of(h).attend(spec, *inputs, needs_logits=True)


def attend_backward(
    spec: Attention,
    inputs: AttentionInputs,
    saved: Sequence[Tensor],
    grad_y: Tensor,
    into: SourceGrads = SourceGrads(),  # noqa: B008
) -> tuple[Tensor, LogitGrads]:
    """Return the gradients of the h and the logits of `attend`, for hand-written backward passes.

    Args:
        spec: Edges, heads and options.
        inputs: Inputs and result of `attend_and_save`.
        saved: Tensors that `attend_and_save` returned.
        grad_y: Gradient of the result, [n, f].
        into: Contiguous gradients to which those of source tensors are added.

    Returns:
        The gradient of h, [s, f], in the dtype of grad_y, and those of the logits in the dtype of sums.
    """
    check_rows("grad_y", grad_y, spec.adj, spec.adj.num_targets, low_precision=True)
    for name, rows in zip(("into.h", "into.logits"), into, strict=True):
        if rows is not None:
            check_rows(name, rows, spec.adj, spec.adj.num_sources, low_precision=name == "into.h")
    grad_h, grads = backend_of(grad_y).attend_backward(
        spec, inputs, saved, grad_y.contiguous(), needs_h=True, needs_logits=True, into=into
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
    """Return GATv2's logits, [E, H]: `attention . leaky_relu(left_u + right_v + features_e edge_map)` for each head.

    (Brody et al. 2022, eq. 7, for an edge e = (u, v).) A rank may have any slice of the columns, also one that cuts a
    head; the logits summed over all slices are those for all columns.

    Args:
        adj: The edges.
        left: Source rows, [s, W].
        right: Target rows, [n, W].
        attention: Attention vector, [W].
        edge_map: Linear transform of the edge features, [K, W]. Give it together with `features`, or neither.
        bounds: Column range of each head: head j has columns `bounds[j]:bounds[j + 1]`.
        loop: Mask of targets that get a self-loop in addition to their edges, bool [n]. The result is then [E + n, H]:
            the logits of edges and those of self-loops, 0 for targets without one. Features need `features.loops`.
        slope: Negative slope of leaky_relu.
        features: Constant features of the edges.
    """
    check_rows("left", left, adj, adj.num_sources)
    check_rows("right", right, adj, adj.num_targets)
    check_bounds(bounds, left.shape[1], len(bounds) - 1)
    if right.shape[1:] != left.shape[1:] or attention.shape != left.shape[1:]:
        shapes = f"{list(right.shape)} and {list(attention.shape)}"
        raise ValueError(f"right and attention ({shapes}) must have the {left.shape[1]} columns of left")
    if not left.dtype == right.dtype == attention.dtype:
        raise ValueError(
            f"left ({left.dtype}), right ({right.dtype}) and attention ({attention.dtype}) must have the same dtype"
        )
    loop = checked_loop(loop, adj)
    if (features is None) != (edge_map is None):
        raise ValueError("edge_map and features go together: give both or neither")
    if features is not None and edge_map is not None:
        features = checked_features(features, edge_map, left, adj, loop)
    spec = Pairs(adj=adj, bounds=bounds, loop=loop, slope=slope, features=features)
    logits: Tensor = PairLogits.apply(left, right, attention, edge_map, backend_of(left), spec)  # type: ignore[no-untyped-call]
    return logits


def dot_logits(adj: Adjacency, left: Tensor, right: Tensor, *, bounds: Sequence[int]) -> Tensor:
    """Return the dot products `right_v . left_u` of each edge (u, v) and head, [E, H].

    They are the logits of attention with keys and queries (Vaswani et al. 2017, eq. 1, without its factor).

    Args:
        adj: The edges.
        left: Source rows (keys), [s, W].
        right: Target rows (queries), [n, W].
        bounds: Column range of each head: head j has columns `bounds[j]:bounds[j + 1]`.
    """
    check_rows("left", left, adj, adj.num_sources)
    check_rows("right", right, adj, adj.num_targets)
    check_bounds(bounds, left.shape[1], len(bounds) - 1)
    if right.shape[1:] != left.shape[1:] or right.dtype != left.dtype:
        raise ValueError(f"right ({right.dtype} {list(right.shape)}) must have the columns and the dtype of left")
    spec = Attention(adj=adj, bounds=bounds, loop=None, slope=1.0, steps=1)
    logits: Tensor = DotLogits.apply(left, right, backend_of(left), spec)  # type: ignore[no-untyped-call]
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
    """Return `y_v = sum_e alpha_e h_u`, [n, f], with alpha the softmax of one logit per edge and head.

    Args:
        adj: The edges.
        h: Source rows, [s, f].
        logits: Logits as `pair_logits` or `dot_logits` return them, [E, H], or with self-loops [E + n, H].
        bounds: As for `attend`.
        loop: As for `attend`.
        steps: As for `attend`.
        dropout: As for `attend`.
    """
    check_rows("h", h, adj, adj.num_sources)
    loop = checked_loop(loop, adj)
    num_logits = adj.num_edges + (0 if loop is None else adj.num_targets)
    if logits.dim() != 2 or len(logits) != num_logits or logits.dtype != h.dtype:
        raise ValueError(f"logits ({logits.dtype} {list(logits.shape)}) must be {h.dtype} [{num_logits}, heads]")
    check_bounds(bounds, h.shape[1], logits.shape[1])
    check_steps(steps, adj)
    check_dropout(dropout, adj)
    spec = Attention(adj=adj, bounds=bounds, loop=loop, slope=1.0, steps=steps, dropout=dropout)
    y: Tensor = AttendEdgesFunction.apply(h, logits, backend_of(h), spec)  # type: ignore[no-untyped-call]
    return y


def keyed_dropout(
    x: Tensor, rows: Tensor, *, key: RandomKey, p: float, first_column: int = 0, relu: bool = False
) -> Tensor:
    """Return x after dropout, [n, F]: 0 with probability p, else `x / (1 - p)`.

    The mask depends only on (key, vertex, column), so it is the same on any number of ranks.

    Args:
        x: Rows, [n, F].
        rows: Global vertex id of each row, int64 [n].
        key: Random key of 64 bits. A tensor, int64 [1] on the device of x, is read when the kernel runs.
        p: Probability that an element is dropped.
        first_column: Global number of the first column of x.
        relu: True for dropout of `max(x, 0)`, in the same pass.
    """
    if not 0 <= p < 1:
        raise ValueError(f"p={p} must be in [0, 1)")
    check_matrix("x", x, "n", "F", low_precision=True)
    if rows.dtype != torch.int64 or rows.shape != x.shape[:1]:
        raise ValueError(
            f"rows ({rows.dtype} {list(rows.shape)}) must be int64 [{x.shape[0]}], a vertex id per row of x"
        )
    if p == 0:
        return torch.relu(x) if relu else x
    dropout = ReluDropout if relu else KeyedDropout
    word = key_word(key)  # signed: if PyTorch's profiler records shapes, it rejects larger integers as arguments
    y: Tensor = dropout.apply(x, rows, backend_of(x), word, p, first_column)  # type: ignore[no-untyped-call]
    return y
