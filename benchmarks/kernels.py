"""Time weft's kernels against the sparse products of PyTorch and (if installed) DGL, on one graph in one process.

    python benchmarks/kernels.py --graph rmat:vertices=233k,edges=19m --widths 16,64,256 --out kernels-NAME

Contenders take turns (A B C A B C ...), so that a machine that slows down slows all of them. Results are first compared
with a float64 product; no ratio is reported if one differs. `gather` only copies the same rows, with `index_select`,
one block at a time: the time that reading the rows takes.

    python benchmarks/kernels.py --alone --shuffle --widths 4,8,12,16,20,24,28,32 --rounds 15 --out kernels-widths-NAME

times only weft's sum, at several widths in turns, on rows with the alignment that dense layers give to their results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import weft
from weft.data.adjacency import Adjacency
from weft.kernels import Scale, attend, spmm
from weft.runtime.memory.alignment import empty_aligned, needs_padding
from weft.runtime.native import _native

GATHER_ROWS = 1 << 14  # rows per copy: the copy stays in the cache, so only the reads take time
TOLERANCE = 1e-4  # relative to the largest entry: float32 sums of up to 100,000 numbers in any order

Product = Callable[[], Tensor]


@dataclass(frozen=True)
class Contest:
    """Contenders that compute the same product."""

    contenders: dict[str, Product]
    """Functions that compute the product, by contender."""
    truth: Tensor | None = None
    """Expected product in float64. None: do not compare."""


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    if options.huge_pages:  # affects every contender: PyTorch reads it with the first tensor
        os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    graph = load_graph(options.graph, options.shuffle)
    print(
        f"{options.graph}: {graph.num_targets} vertices, {graph.num_edges} edges, {options.threads} threads, "
        f"{_native.current_isa()}",
        flush=True,
    )
    widths, rows = [int(width) for width in options.widths.split(",")], []
    contests = (
        measure(kind, width, PRODUCTS[kind](graph, width), options.rounds)
        for kind in options.products.split(",")
        for width in widths
    )
    for row in by_width(graph, widths, options.rounds) if options.alone else contests:
        rows.append(row)
        print(line(row), flush=True)
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="rmat:vertices=233k,edges=19m", help="any graph that weft.load accepts")
    parser.add_argument(
        "--shuffle", action="store_true", help="renumber the vertices at random, which removes locality"
    )
    parser.add_argument("--huge-pages", action="store_true", help="use huge pages for the tensors of every contender")
    parser.add_argument("--widths", default="16,64,256")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--products",
        default="sum,scaled,weighted,backward,attend",
        help=f"products to time, out of {', '.join(PRODUCTS)}",
    )
    which.add_argument("--alone", action="store_true", help="time only weft's sum, at all widths in turns")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


def load_graph(name: str, shuffle: bool) -> Adjacency:
    adj = weft.load(name).in_edges
    source, target = adj.edges()
    if shuffle:
        order = torch.randperm(adj.num_sources, generator=torch.Generator().manual_seed(0))
        source, target = order[source], order[target]
    weight = torch.rand(adj.num_edges, generator=torch.Generator().manual_seed(1))
    return Adjacency.from_edges(source, target, num_sources=adj.num_sources, num_targets=adj.num_targets, weight=weight)


def sums(adj: Adjacency, width: int) -> Contest:
    contest = products(adj, width, torch.ones(adj.num_edges), Scale(), weighted=False)
    x = torch.rand(adj.num_sources, width)
    contest.contenders["gather"] = lambda: gather(adj, x)
    return contest


def weighted(adj: Adjacency, width: int) -> Contest:
    assert adj.weight is not None
    return products(adj, width, adj.weight, Scale(), weighted=True)


def scaled(adj: Adjacency, width: int) -> Contest:
    """Compare sums with the factors of GCN: weft scales by vertex, PyTorch gets the factors as edge weights."""
    factor = adj.degree.clamp(min=1).float().rsqrt()
    source, target = adj.edges()
    return products(adj, width, factor[source] * factor[target], Scale(source=factor, target=factor), weighted=False)


def products(adj: Adjacency, width: int, values: Tensor, scale: Scale, *, weighted: bool) -> Contest:
    x = torch.rand(adj.num_sources, width, generator=torch.Generator().manual_seed(2))
    contenders: dict[str, Product] = {"weft": lambda: spmm(adj, x, scale=scale, weighted=weighted)}
    contenders |= torch_products(adj.indptr, adj.indices, values, x)
    if scale == Scale():
        contenders |= dgl_product(adj, x, values if weighted else None)
    return Contest(contenders, exact(adj.indptr, adj.indices, values, x))


def backward(adj: Adjacency, width: int) -> Contest:
    """Compare the gradient of a sum; PyTorch gets the transpose, which its own backward pass would build every time."""
    edges = adj.transpose
    x = torch.rand(adj.num_sources, width, requires_grad=True)
    grad = torch.rand(adj.num_targets, width, generator=torch.Generator().manual_seed(3))
    y, values = spmm(adj, x), torch.ones(adj.num_edges)
    contenders: dict[str, Product] = {"weft": lambda: torch.autograd.grad(y, x, grad, retain_graph=True)[0]}
    contenders |= torch_products(edges.indptr, edges.indices, values, grad)
    return Contest(contenders, exact(edges.indptr, edges.indices, values, grad))


def attention(adj: Adjacency, width: int) -> Contest:
    """Time attention with four heads, forward, and forward with backward; PyTorch has no such product."""
    generator = torch.Generator().manual_seed(4)
    h, logit_src, logit_dst = (torch.randn(adj.num_sources, size, generator=generator) for size in (width, 4, 4))
    bounds = [width * head // 4 for head in range(5)]
    inputs = [tensor.clone().requires_grad_() for tensor in (h, logit_src, logit_dst)]

    def both() -> Tensor:
        y = attend(adj, *inputs, bounds=bounds)
        torch.autograd.grad(y, inputs, h)
        return y.detach()

    return Contest({"weft": lambda: attend(adj, h, logit_src, logit_dst, bounds=bounds), "weft with backward": both})


PRODUCTS = {"sum": sums, "scaled": scaled, "weighted": weighted, "backward": backward, "attend": attention}


def torch_products(indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor) -> dict[str, Product]:
    matrices = {name: csr(indptr, indices, values, len(x), getattr(torch, name)) for name in ("int32", "int64")}
    return {f"torch {name}": partial(torch.sparse.mm, matrix, x) for name, matrix in matrices.items()}


def exact(indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """Return the product in float64, computed by PyTorch."""
    y: Tensor = torch.sparse.mm(csr(indptr, indices, values.double(), len(x), torch.int64), x.double())
    return y


def csr(indptr: Tensor, indices: Tensor, values: Tensor, num_cols: int, dtype: torch.dtype) -> Tensor:
    size = (len(indptr) - 1, num_cols)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(indptr.to(dtype), indices.to(dtype), values, size, check_invariants=False)


def dgl_product(adj: Adjacency, x: Tensor, weight: Tensor | None) -> dict[str, Product]:
    try:
        import dgl
    except ImportError:
        return {}
    source, target = adj.edges()
    graph = dgl.graph((source, target), num_nodes=adj.num_sources)
    if weight is None:
        return {"dgl": lambda: dgl.ops.copy_u_sum(graph, x)}
    return {"dgl": lambda: dgl.ops.u_mul_e_sum(graph, x, weight[:, None])}


def gather(adj: Adjacency, x: Tensor) -> Tensor:
    buffer = x.new_empty(GATHER_ROWS, x.shape[1])
    for block in adj.indices.split(GATHER_ROWS):
        torch.index_select(x, 0, block, out=buffer[: len(block)])
    return buffer


def measure(kind: str, width: int, contest: Contest, rounds: int) -> dict[str, Any]:
    """Compare the results of the contenders, which warms up, then time them in turns, and return the row.

    Args:
        kind: Name of the product.
        width: Columns of the rows.
        contest: The contenders.
        rounds: Number of rounds.
    """
    contenders, wrong = contest.contenders, []
    for name, product in contenders.items():
        y = product()
        if contest.truth is not None and name != "gather" and not error(y, contest.truth) <= TOLERANCE:
            wrong.append(name)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, product in contenders.items():
            start = time.perf_counter()
            product()
            seconds[name].append(time.perf_counter() - start)
    row: dict[str, Any] = {"product": kind, "width": width, "seconds": seconds, "differ": wrong}
    rivals = [name for name in seconds if name not in ("weft", "gather", "weft with backward")]
    if rivals and not wrong:
        best = min(rivals, key=lambda name: statistics.median(seconds[name]))
        row["best_rival"] = best
        row["ratios"] = [theirs / ours for theirs, ours in zip(seconds[best], seconds["weft"], strict=True)]
    return row


def by_width(adj: Adjacency, widths: list[int], rounds: int) -> list[dict[str, Any]]:
    """Time weft's sum at each width, on padded rows and, if the width needs padding, on rows without padding.

    The rows are allocated anew in each round, since their address changes the time by up to a tenth.

    Args:
        adj: The graph.
        widths: Numbers of columns.
        rounds: Number of rounds.
    """
    rows: list[dict[str, Any]] = []
    for width in widths:
        x = torch.randint(8, (adj.num_sources, width)).float()  # whole numbers: their sums are exact
        truth = exact(adj.indptr, adj.indices, torch.ones(adj.num_edges), x)
        layouts = ["weft", "side by side"] if needs_padding(x, width) else ["weft"]
        wrong = [layout for layout in layouts if not torch.equal(spmm(adj, laid(x, layout)).double(), truth)]
        seconds: dict[str, list[float]] = {layout: [] for layout in layouts}
        rows.append({"product": "sum", "width": width, "seconds": seconds, "differ": wrong})
    for row in rows * rounds:
        for layout, samples in row["seconds"].items():
            x = laid(torch.rand(adj.num_sources, row["width"]), layout)
            spmm(adj, x)
            start = time.perf_counter()
            spmm(adj, x)
            samples.append(time.perf_counter() - start)
    return rows


def laid(x: Tensor, layout: str) -> Tensor:
    """Return the rows with the padding of dense layers ("weft"), or as they are ("side by side")."""
    return empty_aligned(x, *x.shape).copy_(x) if layout == "weft" else x


def error(y: Tensor, truth: Tensor) -> float:
    """Return the largest difference, relative to the largest entry."""
    return float((y - truth).abs().max() / truth.abs().max())


def line(row: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {statistics.median(times):.4f} s" for name, times in row["seconds"].items())
    verdict = f"  NO RATIO: {', '.join(row['differ'])} differ" if row["differ"] else ""
    if "ratios" in row:
        ratios = row["ratios"]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        verdict = f"  {middle:.2f}x ({low:.2f} to {high:.2f}) over {row['best_rival']}"
    return f"{row['product']:>9} {row['width']:>4}: {times}{verdict}"


def save(name: str, content: dict[str, Any]) -> None:
    """Write benchmarks/results/NAME.json with a description of this machine and the measurements."""
    path = Path(__file__).parent / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **content}, indent=1) + "\n")


def machine() -> dict[str, Any]:
    names = [
        text.split(":")[1].strip() for text in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in text
    ]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "processor": names[0] if names else platform.processor(),
        "logical_processors": len(names),
        "instruction_set": _native.current_isa(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "not committed",
    }


if __name__ == "__main__":
    main()
