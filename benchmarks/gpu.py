"""Run the GPU tests, then compare weft's kernels and epochs with those of PyTorch and PyG on one GPU.

    make gpu OUT=gpu-NAME                       builds weft first, with installed packages and the wheels in .whl/
    python benchmarks/gpu.py --out gpu-NAME     writes results/gpu-NAME.json and gpu-NAME.txt, the table

Each part runs in its own process with a time limit and writes each row at once, so that a part that fails, hangs or
leaves the GPU unusable does not affect the others. Seconds are medians of times between CUDA events. Results are
compared first; a contender whose result differs, or that runs out of memory, has no ratio. The contenders: `cusparse`
is torch.sparse with the matrix and its transpose built beforehand, `pyg-edges` gathers and scatters, `pyg-csr` is PyG's
product with a CSR matrix. `aims` compares the ratios with the speed that weft should reach.

To test the script without a GPU:

    python benchmarks/gpu.py --device cpu --graphs 300/2000 --epoch-graph rmat:... --parts products
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from epoch import load, loop
from kernels import Product, csr, error, machine, save
from rivals import run_pyg
from torch import Tensor, nn

import weft
from weft.config.optimisations import Optimisations
from weft.data import Adjacency
from weft.kernels import Scale, attend, ops, spmm, spmm_transposed
from weft.training.cuda_graph import MAX_EDGES
from weft.utils.units import format_bytes

TOLERANCE = 1e-3  # relative to the largest entry: float32 sums of up to a million numbers in any order
HEADS = 4
QUADRANTS = (0.57, 0.19, 0.19)  # probabilities of R-MAT, as in weft.data.io.generate
SECONDS = {"tests": 240, "rates": 15, "products": 70, "attention": 90, "epochs": 70, "offload": 25}
"""Time limit of each part; all parts and the build before them stay below nine minutes."""
CORA = "sbm:vertices=2708,degree=4,features=1433,classes=7"
ROUNDS, WARMUPS = 7, 2

Work = Callable[[], object]
Emit = Callable[..., None]


def main() -> int:
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("this machine has no CUDA device: nothing is measured (--device cpu tests the script)")
        return 2
    if options.part:
        return run_part(options)
    names, results = options.parts.split(","), dict[str, Any]()
    for name in names:
        results[name] = in_a_process(name, options)
        if options.out:
            save(options.out, {"options": vars(options), "gpu": gpu(options.device), "parts": results})
    met = aims([row for result in results.values() for row in result["rows"]])
    text = "\n".join(table(results, met))
    print(text)
    if options.out:
        save(options.out, {"options": vars(options), "gpu": gpu(options.device), "parts": results, "aims": met})
        (Path(__file__).parent / "results" / f"{options.out}.txt").write_text(text + "\n")
    failed = [name for name, result in results.items() if any(row.get("passed") is False for row in result["rows"])]
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(SECONDS), help=f"parts to run, out of {', '.join(SECONDS)}")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to test the script on small graphs")
    parser.add_argument(
        "--graphs", default="300000/15500000,2400000/124000000", help="sizes of R-MAT graphs: vertices/edges"
    )
    parser.add_argument("--widths", default="16,64,128,256")
    parser.add_argument("--epoch-graph", default="rmat:vertices=200k,edges=4.65m,features=128,classes=40")
    parser.add_argument("--rows", type=int, default=4_000_000, help="rows of the table in host memory, 64 float32 each")
    parser.add_argument("--workers", type=int, default=12, help="number of test processes (tests mostly compile)")
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json and NAME.txt")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_a_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a part in a new process, and return its rows, its exit code, its seconds and the end of its errors."""
    arguments = {"device": options.device, "graphs": options.graphs, "widths": options.widths, "rows": options.rows}
    arguments |= {"epoch-graph": options.epoch_graph, "workers": options.workers, "part": name}
    arguments["until"] = time.time() + 0.9 * SECONDS[name]
    command = [sys.executable, __file__, *(f"--{key}={value}" for key, value in arguments.items())]
    begin = time.perf_counter()
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS[name], check=False)
        out, errors, code = ended.stdout, ended.stderr, str(ended.returncode)
    except subprocess.TimeoutExpired as timeout:
        out, errors = ((text or b"").decode(errors="replace") for text in (timeout.stdout, timeout.stderr))
        code = "out of time"
    lines = out.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    print(f"{name}: {len(rows)} rows, exit code {code}", flush=True)
    return {
        "rows": rows,
        "exit_code": code,
        "seconds": time.perf_counter() - begin,
        "errors": errors[-4000:].replace(f"{Path(__file__).resolve().parents[1]}/", ""),
    }


def run_part(options: argparse.Namespace) -> int:
    """Run a part in this process, and print each row as a JSON object."""

    def emit(**row: Any) -> None:
        print(json.dumps({"part": options.part, **row}), flush=True)

    for name, step in PARTS[options.part](options, emit):
        if options.until and time.time() > options.until:
            emit(what=name, missing="no time left")
            continue
        with row_of(lambda **row: emit(**row) if "missing" in row else None, what=name):
            step()
    return 0


Steps = Iterator[tuple[str, Work]]


def tests(options: argparse.Namespace, emit: Emit) -> Steps:
    """Yield a run of the tests that need a GPU."""

    def run() -> None:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--numprocesses={options.workers}", "tests"]
        # pytest-benchmark, if it is installed, warns that xdist disables it, and warnings are errors.
        command += ["-p", "no:benchmark"]
        root = Path(__file__).parent.parent
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
        emit(what="tests", passed=ended.returncode == 0, said=ended.stdout[-8000:])

    yield "tests", run


def rates(options: argparse.Namespace, emit: Emit) -> Steps:
    """Yield copies that measure the bandwidth of device memory and of the bus, in bytes per second."""
    size = options.rows * 64

    def copies() -> None:
        source = torch.rand(size, device=options.device)
        target = torch.empty_like(source)
        host = pinned(torch.rand(size), options.device)
        for name, work, num_bytes in (
            ("device copy", lambda: target.copy_(source), 8 * size),
            ("host to device", lambda: source.copy_(host, non_blocking=True), 4 * size),
            ("device to host", lambda: host.copy_(source, non_blocking=True), 4 * size),
        ):
            emit(what=name, contender="torch", rate=num_bytes / seconds_of(work, options.device))

    yield "copies", copies


def products(options: argparse.Namespace, emit: Emit) -> Steps:
    """Yield sums of neighbours' rows, forward and backward, and the sums of GCN with its factors and self-loops."""
    for name in options.graphs.split(","):
        vertices, edges = map(int, name.split("/"))
        adj = rmat(vertices, edges, options.device)
        for width in map(int, options.widths.split(",")):
            about = {"graph": name, "width": width, "gathered_bytes": 4 * width * adj.num_edges}
            yield f"sum {name} {width}", partial(sums, adj, width, partial(emit, **about), options.device)
            yield f"gcn {name} {width}", partial(scaled_sums, adj, width, partial(emit, **about), options.device)


def sums(adj: Adjacency, width: int, emit: Emit, device: str) -> None:
    x = torch.rand(adj.num_sources, width, device=device)
    source, target = adj.edges()
    ones = torch.ones(adj.num_edges, device=device)
    matrix = csr(adj.indptr, adj.indices, ones, adj.num_sources, torch.int32)
    wide = csr(adj.indptr, adj.indices, ones, adj.num_sources, torch.int64)
    back = csr(adj.transpose.indptr, adj.transpose.indices, ones, adj.num_targets, torch.int32)
    truth = torch.sparse.mm(csr(adj.indptr, adj.indices, ones.double(), adj.num_sources, torch.int64), x.double())
    contenders = {
        "weft": lambda: spmm(adj, x),
        "cusparse": lambda: torch.sparse.mm(matrix, x),
        "pyg-csr": lambda: pyg().spmm(wide, x),
        "pyg-edges": lambda: pyg().scatter(x.index_select(0, source), target, dim_size=adj.num_targets),
    }
    contest("sum", contenders, emit, device, truth)
    del truth
    contest(
        "sum backward",
        {"weft": lambda: spmm_transposed(adj, x), "cusparse": lambda: torch.sparse.mm(back, x)},
        emit,
        device,
        torch.sparse.mm(
            csr(adj.transpose.indptr, adj.transpose.indices, ones.double(), adj.num_targets, torch.int64), x.double()
        ),
    )


def scaled_sums(adj: Adjacency, width: int, emit: Emit, device: str) -> None:
    """Compare the aggregate of GCN: weft's kernel scales and adds loops, cuSPARSE has the factors in its matrix."""
    x = torch.rand(adj.num_sources, width, device=device)
    root = (adj.degree + 1).float().rsqrt()
    scale = Scale(source=root, target=root, loop=root * root)
    source, target = adj.edges()
    values = root[source] * root[target]
    del source, target
    matrix = csr(adj.indptr, adj.indices, values, adj.num_sources, torch.int32)
    loops = (root * root)[:, None]
    contenders: dict[str, Product] = {
        "weft": lambda: spmm(adj, x, scale=scale),
        "cusparse": lambda: torch.sparse.mm(matrix, x).addcmul_(x, loops),
    }
    contest("gcn", contenders, emit, device, contenders["cusparse"]())


def attention(options: argparse.Namespace, emit: Emit) -> Steps:
    """Yield the aggregate of GAT with four heads: forward, and forward with backward."""
    for name in options.graphs.split(","):
        vertices, edges = map(int, name.split("/"))
        adj = rmat(vertices, edges, options.device)
        for width in map(int, options.widths.split(",")):
            about = {"graph": name, "width": width, "gathered_bytes": 4 * width * adj.num_edges}
            yield f"attention {name} {width}", partial(attentions, adj, width, partial(emit, **about), options.device)


def attentions(adj: Adjacency, width: int, emit: Emit, device: str) -> None:
    bounds = [width * head // HEADS for head in range(HEADS + 1)]
    source, target = adj.edges()
    inputs = [torch.randn(adj.num_sources, size, device=device).requires_grad_() for size in (width, HEADS, HEADS)]
    grad = torch.randn(adj.num_targets, width, device=device)

    def theirs() -> Tensor:
        h, left, right = inputs
        logits = torch.nn.functional.leaky_relu(left[source] + right[target], 0.2)
        alpha = pyg().softmax(logits, target, num_nodes=adj.num_targets)
        rows = h.view(-1, HEADS, width // HEADS)[source] * alpha[:, :, None]
        sums: Tensor = pyg().scatter(rows, target, dim_size=adj.num_targets)
        return sums.view(-1, width)

    ways = {"weft": lambda: attend(adj, *inputs, bounds=bounds), "pyg-edges": theirs}

    def forward(way: Product) -> Tensor:
        with torch.no_grad():
            return way()

    def both(way: Product) -> Tensor:
        return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(way(), inputs, grad)])

    truth = forward(ways["weft"])
    contest("attention", {name: partial(forward, way) for name, way in ways.items()}, emit, device, truth)
    del truth
    contest("attention and backward", {name: partial(both, way) for name, way in ways.items()}, emit, device, None)


def epochs(options: argparse.Namespace, emit: Emit) -> Steps:
    """Yield training epochs with the same weights in every contender.

    The second graph is as small as Cora: there, the time to launch kernels dominates.
    """
    for graph_name, models in ((options.epoch_graph, ("gcn", "sage", "gat")), (CORA, ("gcn", "gat"))):
        graph = load(graph_name)
        for kind in models:
            about = {"what": f"{'small ' * (graph_name == CORA)}epoch {kind}", "graph": graph_name}
            yield f"{kind} {graph_name}", partial(train, graph, kind, partial(emit, **about), options.device)


def train(graph: weft.Graph, kind: str, emit: Emit, device: str) -> None:
    torch.manual_seed(0)
    model = weft.nn.make_model(kind, graph.num_features, graph.num_classes, dropout=0.0, hidden=256, heads=HEADS)
    makers: dict[str, Callable[[nn.Module], tuple[Work, Product]]] = {
        "weft": lambda net: loop("single", graph, net, Optimisations(), device),
        "pyg-edges": lambda net: run_pyg(graph, net, "pyg-edges", device),
    }
    if kind != "gat":  # PyG's attention does not support CSR matrices
        makers["pyg-csr"] = lambda net: run_pyg(graph, net, "pyg-csr", device)
    if graph.num_edges <= MAX_EDGES:  # weft captures no larger graphs in a CUDA graph
        makers["weft-without-capture"] = lambda net: loop("single", graph, net, Optimisations(capture=False), device)
    truth: Tensor | None = None
    for name, make in makers.items():
        with row_of(emit, contender=name) as row:
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            epoch, logits = make(copy.deepcopy(model))
            with torch.no_grad():
                actual = logits().detach()
            truth = actual if truth is None else truth
            if not (differ := error(actual, truth)) <= TOLERANCE:
                row["differs"] = differ
            row["seconds"] = seconds_of(epoch, device)
            if device == "cuda":
                row["peak_bytes"] = torch.cuda.max_memory_allocated()


def offload(options: argparse.Namespace, emit: Emit) -> Steps:
    """Yield the loading of rows from host memory into GPU slots: as `offload` does it, and by a kernel over the bus."""

    def gathers() -> None:
        from weft.runtime.streams import Staging, streams_of
        from weft.storage.host_rows import MemoryRows

        width, count = 64, options.rows // 2
        device = torch.device(options.device)
        table = MemoryRows(options.rows, width, torch.float32, torch.device("cpu"), Staging(streams_of(device)))
        table.tensor().uniform_()
        rows = torch.randperm(options.rows)[:count].sort().values
        out, rows_on_device = torch.empty(count, width, device=device), rows.to(device)
        ways: dict[str, Work] = {"as today": lambda: table.gather(rows, out)}
        if device.type == "cuda" and (kernels := ops.triton_backend()) is not None:
            ways["kernel"] = lambda: kernels.gather_rows(table.tensor(), rows_on_device, out)  # type: ignore[attr-defined]
        for name, way in ways.items():
            out.zero_()
            way()
            same = torch.equal(out.cpu(), table.tensor()[rows])
            rate = out.nbytes / seconds_of(way, options.device)
            emit(what="rows to slots", contender=name, rate=rate, **({} if same else {"differs": 1.0}))

    yield "rows to slots", gathers


PARTS: dict[str, Callable[[argparse.Namespace, Emit], Steps]] = {
    "tests": tests,
    "rates": rates,
    "products": products,
    "attention": attention,
    "epochs": epochs,
    "offload": offload,
}


def contest(what: str, contenders: dict[str, Product], emit: Emit, device: str, truth: Tensor | None) -> None:
    """Emit a row for each contender: its seconds, and its error if that exceeds `TOLERANCE`.

    Args:
        what: Name of the operation.
        contenders: Functions that compute it, by contender.
        emit: Prints a row.
        device: "cuda" or "cpu".
        truth: Expected result. None: do not compare.
    """
    for name, work in contenders.items():
        with row_of(emit, what=what, contender=name) as row:
            if truth is not None and not (differ := error(work(), truth)) <= TOLERANCE:
                row["differs"] = differ
            row["seconds"] = seconds_of(work, device)


@contextmanager
def row_of(emit: Emit, **row: Any) -> Iterator[dict[str, Any]]:
    """Context manager that emits a row after the `with` has filled it; an exception is recorded as `missing`."""
    try:
        yield row
    except Exception as wrong:
        memory = isinstance(wrong, torch.OutOfMemoryError)
        row["missing"] = "out of memory" if memory else f"{type(wrong).__name__}: {wrong}"[:300]
        if not memory:
            traceback.print_exc()
    emit(**row)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def seconds_of(work: Work, device: str) -> float:
    """Return the median seconds of a function over `ROUNDS` calls after `WARMUPS` calls, by CUDA events on a GPU."""
    samples = []
    for number in range(WARMUPS + ROUNDS):
        seconds = by_events(work) if device == "cuda" else by_clock(work)
        if number >= WARMUPS:
            samples.append(seconds)
    return statistics.median(samples)


def by_events(work: Work) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def by_clock(work: Work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def pyg() -> Any:
    """Return torch_geometric.utils, imported when first needed."""
    import torch_geometric.utils

    return torch_geometric.utils


def pinned(rows: Tensor, device: str) -> Tensor:
    return rows.pin_memory() if device == "cuda" else rows


def rmat(vertices: int, edges: int, device: str) -> Adjacency:
    """Generate an R-MAT graph directly on a device."""
    generator = torch.Generator(device).manual_seed(0)
    keys, missing = [], edges
    while missing > 0:
        size = min(2 * missing, 1 << 26)
        source = torch.zeros(size, dtype=torch.int64, device=device)
        target = torch.zeros_like(source)
        for _ in range((vertices - 1).bit_length()):
            random = torch.rand(size, generator=generator, device=device)
            a, ab, abc = QUADRANTS[0], sum(QUADRANTS[:2]), sum(QUADRANTS)
            target = target * 2 + (random >= ab)
            source = source * 2 + (((random >= a) & (random < ab)) | (random >= abc))
        in_range = (source < vertices) & (target < vertices)
        keys.append((target * vertices + source)[in_range][:missing])
        missing -= len(keys[-1])
    key = torch.cat(keys).sort().values
    begins = torch.arange(vertices + 1, device=device) * vertices
    indices = (key % vertices).int()
    return Adjacency(indptr=torch.searchsorted(key, begins), indices=indices, num_sources=vertices)


AIMS: tuple[tuple[str, str, str, str, float], ...] = (
    ("sums against cached cuSPARSE", "sum", "weft", "cusparse", 1.0),
    ("their gradients", "sum backward", "weft", "cusparse", 1.0),
    ("sums with scale and loops", "gcn", "weft", "cusparse", 1.2),
    ("attention, forward and backward", "attention and backward", "weft", "pyg-edges", 3.0),
    ("an epoch of GCN", "epoch gcn", "weft", "pyg-csr", 1.5),
    ("an epoch of GAT", "epoch gat", "weft", "pyg-edges", 5.0),
    ("an epoch of GCN, small", "small epoch gcn", "weft", "pyg-csr", 3.0),
    ("an epoch of GAT, small", "small epoch gat", "weft", "pyg-edges", 3.0),
)
"""Name of an aim, operation, contender, rival, and how many times as fast as the rival it should be."""


def aims(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ratio of each aim, and whether it is met, for each graph and width where both contenders are right."""
    results = []
    for name, what, ours, theirs, least in AIMS:
        for where, ratio in ratios(rows, what, what, ours, theirs):
            results.append({"aim": name, **where, "least": least, "ratio": ratio, "met": ratio >= least})
    for where, ratio in ratios(rows, "attention and backward", "attention", "weft", "weft"):
        results.append({"aim": "backward by forward, at most", **where, "least": 1.5, "ratio": 1 / ratio - 1})
        results[-1]["met"] = results[-1]["ratio"] <= 1.5
    bus = [row["rate"] for row in rows if row["what"] == "host to device"]
    for row in rows:
        if row["what"] == "rows to slots" and bus and "rate" in row:
            share = row["rate"] / bus[0]
            aim = f"offload's share of the bus, {row['contender']}"
            results.append({"aim": aim, "least": 0.8, "ratio": share, "met": share >= 0.8})
    return results


def ratios(
    rows: Sequence[dict[str, Any]], of: str, to: str, ours: str, theirs: str
) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield graph and width, and the rival's seconds divided by ours.

    Args:
        rows: All rows.
        of: Operation of our row.
        to: Operation of the rival's row.
        ours: Our contender.
        theirs: The rival.
    """
    timed = {
        (row["what"], row["contender"], row.get("graph"), row.get("width")): row["seconds"]
        for row in rows
        if "seconds" in row and "differs" not in row
    }
    for (what, contender, graph, width), seconds in timed.items():
        if (what, contender) == (of, ours) and (other := timed.get((to, theirs, graph, width))):
            yield {"graph": graph, "width": width}, other / seconds


def table(results: dict[str, Any], met: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the printed table: all rows, then the aims."""
    copies = [row["rate"] for part in results.values() for row in part["rows"] if row["what"] == "device copy"]
    for name, result in results.items():
        yield f"== {name} ({result['seconds']:.0f} s, exit code {result['exit_code']})"
        for row in result["rows"]:
            about = " ".join(str(row[key]) for key in ("graph", "width", "contender") if row.get(key) is not None)
            text = f"{row['what']:<24} {about:<60}"
            if "seconds" in row:
                text += f" {1000 * row['seconds']:10.3f} ms"
            if "rate" in row:
                text += f" {format_bytes(int(row['rate']))}/s"
            if "seconds" in row and "gathered_bytes" in row and copies:
                text += f" {row['gathered_bytes'] / row['seconds'] / copies[0]:6.2f} of the copy rate"
            for key in ("differs", "missing", "passed"):
                text += f" {key}: {row[key]}" if key in row else ""
            yield text
    yield "== aims"
    for aim in met:
        about = " ".join(str(aim[key]) for key in ("graph", "width") if aim.get(key) is not None)
        verdict = "met" if aim["met"] else "NOT met"
        yield f"{aim['aim']:<36} {about:<50} {aim['ratio']:7.2f} (aim {aim['least']}) {verdict}"


def gpu(device: str) -> dict[str, Any]:
    """Return the name, memory and software of the GPU."""
    if device != "cuda":
        return {"name": "none"}
    properties = torch.cuda.get_device_properties(0)
    backend = ops.backend_of(torch.zeros(1, device=device))
    return {
        "name": properties.name,
        "bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "kernels": str(getattr(backend, "__name__", backend)),
        **machine(),
    }


if __name__ == "__main__":
    sys.exit(main())
