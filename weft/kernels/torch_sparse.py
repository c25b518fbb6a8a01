"""The backend for tensors that are not on the CPU: PyTorch's own sparse products, attention one head at a time.

Nothing is as large as edges x heads x width; what must be gathered by edge is gathered a block at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from weft.core.random import RandomKey
from weft.data.adjacency import Adjacency
from weft.data.degrees import CompressedRows
from weft.kernels import reference
from weft.kernels.backend import Attention, AttentionInputs, LogitGrads, PairGrads, Pairs, Scale, SourceGrads

MAX_GATHERED = 1 << 24  # numbers gathered by edge at a time: 64 MiB of float32


def spmm(adj: Adjacency, x: Tensor, scale: Scale, weighted: bool, wide: bool = False) -> Tensor:
    del wide  # rows are not narrow here
    x = x.contiguous()
    y = _scaled_product(adj, adj.weight if weighted else None, x, scale.source, scale.target)
    if scale.loop is not None:
        y += x[: adj.num_targets] * scale.loop[:, None]
    return y


def spmm_transposed(
    adj: Adjacency, grad_y: Tensor, scale: Scale, weighted: bool, into: Tensor | None = None, wide: bool = False
) -> Tensor:
    del wide
    edges, grad_y = adj.transpose, grad_y.contiguous()
    grad_x = _scaled_product(edges, edges.weight if weighted else None, grad_y, scale.target, scale.source)
    if scale.loop is not None:
        grad_x[: adj.num_targets] += grad_y * scale.loop[:, None]
    return grad_x if into is None else into.add_(grad_x)


def spmm_max(adj: Adjacency, x: Tensor) -> tuple[Tensor, Tensor]:
    step = max(MAX_GATHERED // max(adj.num_edges, 1), 1)
    blocks = [reference.max_position(adj, block) for block in torch.split(x, step, dim=1)]
    position = torch.cat(blocks, dim=1)
    return x.gather(0, _winners(adj, position)) * (adj.degree > 0)[:, None], position


def spmm_max_backward(adj: Adjacency, position: Tensor, grad_y: Tensor) -> Tensor:
    grad_y = grad_y * (adj.degree > 0)[:, None]
    return grad_y.new_zeros(adj.num_sources, grad_y.shape[1]).scatter_add_(0, _winners(adj, position), grad_y)


def attend(
    over: Attention, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, needs_logits: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    adj = over.adj
    logits = _edge_arguments(over, logit_src, logit_dst)
    logits = leaky_relu(logits, over.slope)
    own = leaky_relu(logit_src[: adj.num_targets] + logit_dst, over.slope) if over.loop is not None else None
    largest = torch.segment_reduce(logits, "max", offsets=adj.indptr, initial=-torch.inf)
    if own is not None and over.loop is not None:
        own = own.masked_fill(~over.loop[:, None], -torch.inf)
        largest = torch.maximum(largest, own)
    largest = largest.masked_fill(largest == -torch.inf, 0)
    target = adj.edges()[1]
    sums = _segment_sum((logits - largest[target]).exp_(), adj.indptr)
    if own is not None:
        sums += (own - largest).exp()
    lse = torch.where(sums == 0, 0, largest + sums.log())
    alpha, own_alpha = _weights(over, logit_src, logit_dst, lse)
    drops, own_drops = _drops(over, logit_src)
    alpha, own_alpha = _times(alpha, drops), None if own_alpha is None else _times(own_alpha, own_drops)
    results = [h]
    for _ in range(over.steps):
        h = _weighted_sum(over, adj.indptr, adj.indices, alpha, own_alpha, h, adj.num_targets)
        results.append(h)
    return h, (lse, *(results[1:-1] if needs_logits else ()))


def attend_backward(
    over: Attention,
    inputs: AttentionInputs,
    kept: Sequence[Tensor],
    grad_y: Tensor,
    *,
    needs_h: bool,
    needs_logits: bool,
    into: SourceGrads = SourceGrads(),  # noqa: B008
) -> tuple[Tensor | None, LogitGrads | None]:
    (_, logit_src, logit_dst, _), (lse, *between) = inputs, kept
    adj, edges = over.adj, over.adj.transpose
    source, target = adj.edges()
    alpha, own_alpha = _weights(over, logit_src, logit_dst, lse)
    drops, own_drops = _drops(over, logit_src)
    alpha_t = _times(alpha, drops)[edges.edge_ids.long()]
    own_kept = None if own_alpha is None else _times(own_alpha, own_drops)
    grad_alpha, grad_own = torch.zeros_like(alpha), torch.zeros_like(lse)
    grad_h: Tensor | None = None
    for step in reversed(range(over.steps)):
        if needs_logits:
            x, y = inputs.between(between)[step : step + 2]
            dots = _head_dots(over, grad_y, y)
            for block in _edge_blocks(adj, x.shape[1]):
                found = _head_dots(over, grad_y[target[block]], x[source[block]])
                grad_alpha[block] += _times(found, None if drops is None else drops[block]) - dots[target[block]]
            if own_alpha is not None:
                grad_own += _times(_head_dots(over, grad_y, x[: adj.num_targets]), own_drops) - dots
        if needs_h or step > 0:
            grad_h = grad_y = _weighted_sum(
                over, edges.indptr, edges.indices, alpha_t, own_kept, grad_y, adj.num_sources
            )
    if into.h is not None and grad_h is not None:
        grad_h = into.h.add_(grad_h)
    if not needs_logits:
        return grad_h, None
    grad_edge = grad_alpha.mul_(alpha).mul_(_slopes(_edge_arguments(over, logit_src, logit_dst), over.slope))
    grads = LogitGrads(
        _segment_sum(grad_edge[edges.edge_ids.long()], edges.indptr), _segment_sum(grad_edge, adj.indptr)
    )
    if own_alpha is not None:
        own = grad_own * own_alpha * _slopes(logit_src[: adj.num_targets] + logit_dst, over.slope)
        grads.source[: adj.num_targets] += own
        grads.target.add_(own)
    return grad_h, grads if into.logits is None else grads._replace(source=into.logits.add_(grads.source))


def pair_logits(over: Pairs, left: Tensor, right: Tensor, attention: Tensor, edge_map: Tensor | None) -> Tensor:
    pairs = _Pairs(over, left, right, edge_map)
    logits = left.new_zeros(len(pairs.source), len(over.bounds) - 1)
    for columns in pairs.blocks():
        logits += leaky_relu(pairs.arguments(columns), over.slope) @ (attention[:, None] * pairs.head_of)[columns]
    return logits if over.loop is None else logits.mul_(pairs.exists)


def pair_backward(
    over: Pairs, left: Tensor, right: Tensor, attention: Tensor, edge_map: Tensor | None, grad_logits: Tensor
) -> PairGrads:
    pairs, edges, num_edges = _Pairs(over, left, right, edge_map), over.adj.transpose, over.adj.num_edges
    grads = PairGrads(*(None if x is None else torch.empty_like(x) for x in (left, right, attention, edge_map)))  # type: ignore[arg-type]
    grad_logits = grad_logits if over.loop is None else grad_logits * pairs.exists
    for columns in pairs.blocks():
        z = pairs.arguments(columns)
        grad = grad_logits @ pairs.head_of[columns].t()
        grads.attention[columns] = (grad * leaky_relu(z, over.slope)).sum(0)
        grad.mul_(_slopes(z, over.slope)).mul_(attention[columns])
        if grads.edge_map is not None and pairs.features is not None:
            for feature, known in enumerate(pairs.features.t()):  # no product: how it is cut depends on the threads
                grads.edge_map[feature, columns] = (grad * known[:, None]).sum(0)
        by_edge, by_loop = grad.split([num_edges, len(grad) - num_edges])
        grads.left[:, columns] = _segment_sum(by_edge[edges.edge_ids.long()], edges.indptr)
        grads.right[:, columns] = _segment_sum(by_edge, over.adj.indptr)
        grads.left[: len(by_loop), columns] += by_loop
        grads.right[: len(by_loop), columns] += by_loop
    return grads


def attend_edges(over: Attention, h: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    adj, num_edges = over.adj, over.adj.num_edges
    alpha = torch.empty_like(logits)
    edges, own = logits[:num_edges], logits[num_edges:]
    largest = torch.segment_reduce(edges, "max", offsets=adj.indptr, initial=-torch.inf)
    if over.loop is not None:
        own = own.masked_fill(~over.loop[:, None], -torch.inf)
        largest = torch.maximum(largest, own)
    largest = largest.masked_fill(largest == -torch.inf, 0)
    target = adj.edges()[1]
    alpha[:num_edges] = (edges - largest[target]).exp_()
    sums = _segment_sum(alpha[:num_edges], adj.indptr)
    if over.loop is not None:
        alpha[num_edges:] = (own - largest).exp_()
        sums += alpha[num_edges:]
        alpha[num_edges:] /= torch.where(sums == 0, 1, sums)
    alpha[:num_edges] /= torch.where(sums == 0, 1, sums)[target]
    if over.dropout is not None:
        alpha = torch.where(reference.edge_mask(adj, len(alpha), alpha.shape[1], over.dropout), alpha, -alpha)
    kept, inputs = _by_edge_and_loop(over, _kept(over, alpha)), []
    for _ in range(over.steps):
        inputs.append(h)
        h = _weighted_sum(over, adj.indptr, adj.indices, *kept, h, adj.num_targets)
    return h, alpha, inputs


def attend_edges_backward(
    over: Attention, alpha: Tensor, inputs: Sequence[Tensor], grad_y: Tensor
) -> tuple[Tensor, Tensor]:
    adj, edges = over.adj, over.adj.transpose
    source, target = adj.edges()
    dropped = alpha < 0
    by_edge, by_loop = _by_edge_and_loop(over, _kept(over, alpha))
    by_entry = by_edge[edges.edge_ids.long()]
    grad_logits = torch.zeros_like(alpha)
    grad_edge, grad_loop = grad_logits[: adj.num_edges], grad_logits[adj.num_edges :]
    for x in reversed(inputs):
        for block in _edge_blocks(adj, x.shape[1]):
            grad_edge[block] += _head_dots(over, grad_y[target[block]], x[source[block]])
        if by_loop is not None:
            grad_loop += _head_dots(over, grad_y, x[: adj.num_targets])
        grad_y = _weighted_sum(over, edges.indptr, edges.indices, by_entry, by_loop, grad_y, adj.num_sources)
    alpha = alpha.abs()
    grad_logits.mul_(alpha).mul_(over.scale).masked_fill_(dropped, 0)
    by_edge, by_loop = _by_edge_and_loop(over, alpha)
    dots = _segment_sum(grad_edge, adj.indptr)
    if by_loop is not None:
        dots += grad_loop
        grad_loop -= by_loop * dots
    grad_edge -= by_edge * dots[target]
    return grad_y, grad_logits


class _Pairs:
    """The pairs of edges and then of loops, and what a block of columns of theirs is: nothing is as large as E x W."""

    def __init__(self, over: Pairs, left: Tensor, right: Tensor, edge_map: Tensor | None) -> None:
        self.left, self.right, self.edge_map = left, right, edge_map
        self.source, self.target = over.adj.edges()
        self.features = None if over.features is None else over.features.rows(loops=over.loop is not None)
        if over.loop is not None:
            itself = torch.arange(len(over.loop), device=left.device)
            self.source, self.target = torch.cat([self.source, itself]), torch.cat([self.target, itself])
            self.exists = torch.cat([over.loop.new_ones(over.adj.num_edges), over.loop])[:, None]
        widths = torch.tensor(over.bounds, device=left.device).diff()
        self.head_of = torch.eye(len(widths), dtype=left.dtype, device=left.device).repeat_interleave(widths, dim=0)

    def blocks(self) -> Iterator[slice]:
        step = max(MAX_GATHERED // max(len(self.source), 1), 1)
        for begin in range(0, self.left.shape[1], step):
            yield slice(begin, begin + step)

    def arguments(self, columns: slice) -> Tensor:
        z = self.left[:, columns][self.source].add_(self.right[:, columns][self.target])
        if self.edge_map is None or self.features is None:
            return z
        return z.addmm_(self.features, self.edge_map[:, columns])


def keyed_dropout(x: Tensor, rows: Tensor, key: RandomKey, p: float, first_column: int, relu: bool) -> Tensor:
    return reference.keyed_dropout(x, rows, key=key, p=p, first_column=first_column, relu=relu)


def relu_dropout_backward(y: Tensor, grad_y: Tensor, p: float) -> Tensor:
    return torch.where(y <= 0, 0, grad_y * (1 / (1 - p)))


def _scaled_product(
    rows: CompressedRows, weight: Tensor | None, x: Tensor, before: Tensor | None, after: Tensor | None
) -> Tensor:
    matrix, x = _kept_matrix(rows, weight, x), x if before is None else x * before[:, None]
    with _same_bits():
        y = torch.bmm(matrix, x[None])[0].contiguous()  # some versions give columns on a GPU
    return y if after is None else y.mul_(after[:, None])


def _kept_matrix(rows: CompressedRows, weight: Tensor | None, x: Tensor) -> Tensor:
    """The matrix [1, rows, columns] of constant weights, or of ones, made once for rows and type.

    By coordinates, since these are what PyTorch promises the same bits of on a GPU.
    """
    key = weight is not None, x.dtype
    if key not in rows.matrices:
        values = x.new_ones(len(rows.indices)) if weight is None else weight
        places = torch.stack([torch.zeros_like(rows.indices), rows.entry_rows, rows.indices]).long()
        size = (1, len(rows.indptr) - 1, len(x))
        rows.matrices[key] = torch.sparse_coo_tensor(places, values, size, check_invariants=False, is_coalesced=True)
    return rows.matrices[key]


@contextmanager
def _same_bits() -> Iterator[None]:
    """Has cuSPARSE asked for COO_ALG2, of which NVIDIA promises the same bits in each run; of CSR_ALG2 it does not."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _product(indptr: Tensor, indices: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """The CSR matrix of `weight` times x; PyTorch wants both index arrays of one type."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        size = (len(indptr) - 1, len(x))
        matrix = torch.sparse_csr_tensor(indptr, indices.long(), weight, size, check_invariants=False)
    y: Tensor = torch.sparse.mm(matrix, x)
    return y


def _winners(adj: Adjacency, position: Tensor) -> Tensor:
    """The source [n, F] that holds each maximum; any one where a row is empty."""
    entry = (adj.indptr[:-1, None] + position).clamp_(max=max(adj.num_edges - 1, 0))
    if adj.num_edges == 0:
        return torch.zeros_like(entry)
    return adj.indices.long()[entry]


def _edge_arguments(over: Attention, logit_src: Tensor, logit_dst: Tensor) -> Tensor:
    """leaky_relu's argument of every edge, [E, H]."""
    source, target = over.adj.edges()
    return logit_src[source].add_(logit_dst[target])


def _weights(over: Attention, logit_src: Tensor, logit_dst: Tensor, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """Softmax weights of the edges [E, H] and of the virtual self edges [n, H]."""
    target = over.adj.edges()[1]
    logits = leaky_relu(_edge_arguments(over, logit_src, logit_dst), over.slope)
    alpha = logits.sub_(lse[target]).exp_()
    if over.loop is None:
        return alpha, None
    own = leaky_relu(logit_src[: len(lse)] + logit_dst, over.slope)
    return alpha, (own - lse).exp() * over.loop[:, None]


def _weighted_sum(
    over: Attention, indptr: Tensor, indices: Tensor, alpha: Tensor, own: Tensor | None, x: Tensor, num_rows: int
) -> Tensor:
    """Each head's product with its own weights, then the self edges; x [., f] -> [num_rows, f]."""
    y = x.new_empty(num_rows, x.shape[1])
    for head, columns in enumerate(_heads(over)):
        y[:, columns] = _product(indptr, indices, alpha[:, head].contiguous(), x[:, columns].contiguous())
        if own is not None:
            num_loops = len(own)
            y[:num_loops, columns] += own[:, head, None] * x[:num_loops, columns]
    return y


def _drops(over: Attention, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What dropout multiplies the weights of the edges [E, H] and of the virtual self edges [n, H] by, if any."""
    if over.dropout is None:
        return None, None
    num_edges, num_loops = over.adj.num_edges, 0 if over.loop is None else len(over.loop)
    factors = reference.edge_mask(over.adj, num_edges + num_loops, like.shape[1], over.dropout).to(like) * over.scale
    return factors[:num_edges], factors[num_edges:]


def _times(values: Tensor, factors: Tensor | None) -> Tensor:
    return values if factors is None else values * factors


def _kept(over: Attention, alpha: Tensor) -> Tensor:
    """The weights after dropout, which has made negative what it drops."""
    return alpha if over.dropout is None else alpha.clamp(min=0).mul_(over.scale)


def _by_edge_and_loop(over: Attention, alpha: Tensor) -> tuple[Tensor, Tensor | None]:
    num_edges = over.adj.num_edges
    return alpha[:num_edges], None if over.loop is None else alpha[num_edges:]


def _heads(over: Attention) -> Iterator[slice]:
    for begin, end in zip(over.bounds[:-1], over.bounds[1:], strict=True):
        yield slice(begin, end)


def _head_dots(over: Attention, a: Tensor, b: Tensor) -> Tensor:
    """Dot products by row and head, [., H]."""
    return torch.stack([(a[:, columns] * b[:, columns]).sum(1) for columns in _heads(over)], dim=1)


def _edge_blocks(adj: Adjacency, width: int) -> Iterator[slice]:
    step = max(MAX_GATHERED // max(width, 1), 1)
    for begin in range(0, adj.num_edges, step):
        yield slice(begin, begin + step)


def _segment_sum(values: Tensor, indptr: Tensor) -> Tensor:
    return torch.segment_reduce(values, "sum", offsets=indptr, initial=0)


def _slopes(argument: Tensor, slope: float) -> Tensor:
    return torch.ones_like(argument).masked_fill_(argument <= 0, slope)
