"""What kernels are given must fit together: ValueError with what does not, and what to give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.kernels.backend import Attention, EdgeDropout, EdgeFeatures
from weft.utils.dtypes import sum_dtype

WIDE = torch.float32, torch.float64


def check_rows(name: str, x: Tensor, adj: Adjacency, num_rows: int, *, narrow: bool = False) -> None:
    """Rows of a type that kernels take, as many as these, on the device of the edges; narrow: bfloat16, too."""
    check_matrix(name, x, num_rows, "columns", narrow=narrow)
    if x.device != adj.device:
        raise ValueError(f"{name} is on {x.device}, the edges on {adj.device}: use adj.to(...) once, beforehand")


def check_matrix(name: str, x: Tensor, num_rows: int | str, columns: str, *, narrow: bool) -> None:
    """Rows of a type that kernels take; num_rows: how many, if that is known."""
    fits = x.dim() == 2 and num_rows in (x.shape[0], "n")
    if not fits or x.dtype not in (*WIDE, *[torch.bfloat16] * narrow):
        kinds = "float32, float64 or bfloat16" if narrow else "float32 or float64"
        raise ValueError(f"{name} ({x.dtype} {list(x.shape)}) must be {kinds} [{num_rows}, {columns}]")


def checked_attention(over: Attention, h: Tensor, logit_src: Tensor, logit_dst: Tensor) -> Attention:
    """An attention over rows that fit it."""
    adj = over.adj
    check_rows("h", h, adj, adj.num_sources, narrow=True)
    check_rows("logit_src", logit_src, adj, adj.num_sources, narrow=True)
    check_rows("logit_dst", logit_dst, adj, adj.num_targets, narrow=True)
    if not h.dtype == logit_src.dtype == logit_dst.dtype:
        raise ValueError(f"h ({h.dtype}), logit_src ({logit_src.dtype}) and logit_dst ({logit_dst.dtype}) must agree")
    if logit_src.shape[1] != logit_dst.shape[1]:
        raise ValueError(f"logit_src has {logit_src.shape[1]} heads, logit_dst {logit_dst.shape[1]}: give as many")
    check_bounds(over.bounds, h.shape[1], logit_src.shape[1])
    check_steps(over.steps, adj)
    check_dropout(over.dropout, adj)
    return replace(over, loop=checked_loop(over.loop, adj))


def check_vector(name: str, vector: Tensor | None, x: Tensor, length: int) -> None:
    """A constant number for each of so many rows, of the type that x is summed in; or none."""
    if vector is None:
        return
    dtype = sum_dtype(x.dtype)
    if vector.shape != (length,) or vector.dtype != dtype or vector.device != x.device:
        found = f"{vector.dtype} {list(vector.shape)} on {vector.device}"
        raise ValueError(f"{name} ({found}) must be {dtype} [{length}] on {x.device}, as x is")
    if vector.requires_grad:
        raise ValueError(f"{name} asks for a gradient, but only x gets one: pass {name}.detach()")


def check_square_start(name: str, adj: Adjacency) -> None:
    """Targets that are the first sources, as loops need."""
    if adj.num_targets > adj.num_sources:
        sizes = f"{adj.num_targets} targets, {adj.num_sources} sources"
        raise ValueError(f"{name} asks for targets to be the first sources, but there are {sizes}: leave it None")


def check_bounds(bounds: Sequence[int], width: int, num_heads: int) -> None:
    """Ranges of all columns, one for each head."""
    ascending = list(bounds) == sorted(bounds) and len(bounds) == num_heads + 1
    if not ascending or bounds[0] != 0 or bounds[-1] != width:
        raise ValueError(f"bounds {list(bounds)} must ascend from 0 to {width} and have {num_heads + 1} entries")


def checked_loop(loop: Tensor | None, adj: Adjacency) -> Tensor | None:
    """Where loops are added, for each target; or nowhere."""
    if loop is None:
        return None
    if loop.dtype != torch.bool or loop.shape != (adj.num_targets,):
        raise ValueError(f"loop ({loop.dtype} {list(loop.shape)}) must be bool [{adj.num_targets}]")
    check_square_start("loop", adj)
    return loop.contiguous()


def check_steps(steps: int, adj: Adjacency) -> None:
    """One step, or several over as many targets as sources."""
    if steps < 1 or (steps > 1 and adj.num_targets != adj.num_sources):
        raise ValueError(
            f"steps={steps} over {adj.num_sources} sources, {adj.num_targets} targets: use steps=1 in a block"
        )


def check_dropout(dropout: EdgeDropout | None, adj: Adjacency) -> None:
    """A probability, and a global vertex for each source and target; or none."""
    if dropout is None:
        return
    if not 0 <= dropout.p < 1:
        raise ValueError(f"dropout.p={dropout.p} must be in [0, 1)")
    for name, ids, count in (
        ("sources", dropout.sources, adj.num_sources),
        ("targets", dropout.targets, adj.num_targets),
    ):
        if ids.dtype != torch.int64 or ids.shape != (count,) or ids.device != adj.device:
            found = f"{ids.dtype} {list(ids.shape)} on {ids.device}"
            raise ValueError(f"dropout.{name} ({found}) must be int64 [{count}] on {adj.device}, a vertex each")


def checked_features(
    features: EdgeFeatures, edge_map: Tensor, left: Tensor, adj: Adjacency, loop: Tensor | None
) -> EdgeFeatures:
    """Features of the edges, and of the loops where these are added."""
    num_features, width = edge_map.shape
    if width != left.shape[1] or edge_map.dtype != left.dtype:
        raise ValueError(
            f"edge_map ({edge_map.dtype} {list(edge_map.shape)}) must be {left.dtype} [features, {left.shape[1]}]"
        )
    for name, known, count in (("edges", features.edges, adj.num_edges), ("loops", features.loops, adj.num_targets)):
        if known is None and (name == "edges" or loop is not None):
            raise ValueError(f"features.{name} is None: give the features of the {name}")
        if known is not None and (known.shape != (count, num_features) or known.dtype != left.dtype):
            found = f"{known.dtype} {list(known.shape)}"
            raise ValueError(f"features.{name} ({found}) must be {left.dtype} [{count}, {num_features}]")
    return EdgeFeatures(features.edges.contiguous(), None if features.loops is None else features.loops.contiguous())
