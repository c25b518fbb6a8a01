"""Checks of the arguments of kernels. Each raises ValueError with the argument, its fault and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.kernels.backend import Attention, EdgeDropout, EdgeFeatures
from weft.utils.dtypes import sum_dtype

FLOAT_DTYPES = torch.float32, torch.float64
"""Dtypes that all kernels support."""


def check_rows(name: str, x: Tensor, adj: Adjacency, num_rows: int, *, low_precision: bool = False) -> None:
    """Check the dtype, number and device of rows.

    Args:
        name: Name of the argument, for the error.
        x: The rows, [n, F].
        adj: Edges, which must be on the device of the rows.
        num_rows: Number of rows that are needed.
        low_precision: True if the kernel supports bfloat16 rows.
    """
    check_matrix(name, x, num_rows, "columns", low_precision=low_precision)
    if x.device != adj.device:
        raise ValueError(f"{name} is on {x.device}, the edges are on {adj.device}: call adj.to(...) once beforehand")


def check_matrix(name: str, x: Tensor, num_rows: int | str, columns: str, *, low_precision: bool) -> None:
    """Check the dtype and the number of rows of a matrix.

    Args:
        name: Name of the argument, for the error.
        x: The matrix.
        num_rows: Number of rows that are needed; "n": any number.
        columns: Name of the second dimension, for the error.
        low_precision: True if the kernel supports bfloat16 rows.
    """
    fits = x.dim() == 2 and num_rows in (x.shape[0], "n")
    if not fits or x.dtype not in (*FLOAT_DTYPES, *[torch.bfloat16] * low_precision):
        kinds = "float32, float64 or bfloat16" if low_precision else "float32 or float64"
        raise ValueError(f"{name} ({x.dtype} {list(x.shape)}) must be {kinds} [{num_rows}, {columns}]")


def checked_attention(spec: Attention, h: Tensor, logit_src: Tensor, logit_dst: Tensor) -> Attention:
    """Check the tensors of an additive attention, and return its specification with a contiguous `loop`.

    Args:
        spec: The attention's edges, heads and options.
        h: Source rows, [s, F].
        logit_src: Logits of sources, [s, H].
        logit_dst: Logits of targets, [n, H].
    """
    adj = spec.adj
    check_rows("h", h, adj, adj.num_sources, low_precision=True)
    check_rows("logit_src", logit_src, adj, adj.num_sources, low_precision=True)
    check_rows("logit_dst", logit_dst, adj, adj.num_targets, low_precision=True)
    if not h.dtype == logit_src.dtype == logit_dst.dtype:
        raise ValueError(
            f"h ({h.dtype}), logit_src ({logit_src.dtype}) and logit_dst ({logit_dst.dtype}) must have the same dtype"
        )
    if logit_src.shape[1] != logit_dst.shape[1]:
        raise ValueError(
            f"logit_src has {logit_src.shape[1]} heads, logit_dst {logit_dst.shape[1]}: give both the same number"
        )
    check_bounds(spec.bounds, h.shape[1], logit_src.shape[1])
    check_steps(spec.steps, adj)
    check_dropout(spec.dropout, adj)
    return replace(spec, loop=checked_loop(spec.loop, adj))


def check_vector(name: str, vector: Tensor | None, x: Tensor, length: int) -> None:
    """Check a vector of constant factors.

    Args:
        name: Name of the argument, for the error.
        vector: The factors, or None.
        x: Rows; the vector must be on their device, in the dtype of their sums.
        length: Number of factors that are needed.
    """
    if vector is None:
        return
    dtype = sum_dtype(x.dtype)
    if vector.shape != (length,) or vector.dtype != dtype or vector.device != x.device:
        actual = f"{vector.dtype} {list(vector.shape)} on {vector.device}"
        raise ValueError(f"{name} ({actual}) must be {dtype} [{length}] on {x.device}, where x is")
    if vector.requires_grad:
        raise ValueError(f"{name} requires a gradient, but only x gets one: pass {name}.detach()")


def check_square_start(name: str, adj: Adjacency) -> None:
    """Check that the targets can be the first sources, which self-loops need.

    Args:
        name: Name of the argument that adds self-loops, for the error.
        adj: The edges.
    """
    if adj.num_targets > adj.num_sources:
        sizes = f"{adj.num_targets} targets, {adj.num_sources} sources"
        raise ValueError(f"{name} needs the targets to be the first sources, but there are {sizes}: leave it None")


def check_bounds(bounds: Sequence[int], width: int, num_heads: int) -> None:
    """Check that the column ranges of the heads cover all columns.

    Args:
        bounds: First column of each head, and the end of the last one.
        width: Number of columns.
        num_heads: Number of heads.
    """
    ascending = list(bounds) == sorted(bounds) and len(bounds) == num_heads + 1
    if not ascending or bounds[0] != 0 or bounds[-1] != width:
        raise ValueError(f"bounds {list(bounds)} must ascend from 0 to {width} and have {num_heads + 1} entries")


def checked_loop(loop: Tensor | None, adj: Adjacency) -> Tensor | None:
    """Check the mask of targets that get a self-loop, and return it contiguous.

    Args:
        loop: bool [n], or None for no self-loops.
        adj: The edges.
    """
    if loop is None:
        return None
    if loop.dtype != torch.bool or loop.shape != (adj.num_targets,):
        raise ValueError(f"loop ({loop.dtype} {list(loop.shape)}) must be bool [{adj.num_targets}]")
    check_square_start("loop", adj)
    return loop.contiguous()


def check_steps(steps: int, adj: Adjacency) -> None:
    """Check the number of propagation steps; several steps need the same number of targets and sources.

    Args:
        steps: Number of steps.
        adj: The edges.
    """
    if steps < 1 or (steps > 1 and adj.num_targets != adj.num_sources):
        raise ValueError(
            f"steps={steps} over {adj.num_sources} sources, {adj.num_targets} targets: use steps=1 in a block"
        )


def check_dropout(dropout: EdgeDropout | None, adj: Adjacency) -> None:
    """Check the probability and the vertex ids of edge dropout.

    Args:
        dropout: The dropout, or None.
        adj: The edges.
    """
    if dropout is None:
        return
    if not 0 <= dropout.p < 1:
        raise ValueError(f"dropout.p={dropout.p} must be in [0, 1)")
    for name, ids, count in (
        ("sources", dropout.sources, adj.num_sources),
        ("targets", dropout.targets, adj.num_targets),
    ):
        if ids.dtype != torch.int64 or ids.shape != (count,) or ids.device != adj.device:
            actual = f"{ids.dtype} {list(ids.shape)} on {ids.device}"
            raise ValueError(
                f"dropout.{name} ({actual}) must be int64 [{count}] on {adj.device}, with a vertex id each"
            )


def checked_features(
    features: EdgeFeatures, edge_map: Tensor, left: Tensor, adj: Adjacency, loop: Tensor | None
) -> EdgeFeatures:
    """Check the features of edges and self-loops, and return them contiguous.

    Args:
        features: The features.
        edge_map: Linear transform of the features, [K, W].
        left: Source rows, [s, W], with the dtype that the features must have.
        adj: The edges.
        loop: Mask of targets that get a self-loop, or None.
    """
    num_features, width = edge_map.shape
    if width != left.shape[1] or edge_map.dtype != left.dtype:
        raise ValueError(
            f"edge_map ({edge_map.dtype} {list(edge_map.shape)}) must be {left.dtype} [features, {left.shape[1]}]"
        )
    for name, rows, count in (("edges", features.edges, adj.num_edges), ("loops", features.loops, adj.num_targets)):
        if rows is None and (name == "edges" or loop is not None):
            raise ValueError(f"features.{name} is None: give the features of the {name}")
        if rows is not None and (rows.shape != (count, num_features) or rows.dtype != left.dtype):
            actual = f"{rows.dtype} {list(rows.shape)}"
            raise ValueError(f"features.{name} ({actual}) must be {left.dtype} [{count}, {num_features}]")
    return EdgeFeatures(features.edges.contiguous(), None if features.loops is None else features.loops.contiguous())
