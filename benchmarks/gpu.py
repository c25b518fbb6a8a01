"""Runs the tests of GPUs, then measures weft's kernels and epochs on one beside PyTorch's and PyG's.

    make gpu OUT=gpu-NAME                           builds weft first, with what is there and what lies in .whl/
    python benchmarks/gpu.py --out gpu-NAME         writes results/gpu-NAME.json and gpu-NAME.txt, the table

Each part is a process of its own with a share of the time and writes each row as soon as it has it, so one that fails,
hangs, or spoils the GPU costs no other. Seconds are medians of times between events. Results are compared first; what
differs, or does not fit into memory, has no ratio. Contenders: `cusparse` is torch.sparse with matrix and transpose
made beforehand, `pyg-edges` gathers and scatters, `pyg-csr` is PyG's product of a CSR matrix. `aims` are weft's own.

    python benchmarks/gpu.py --device cpu --graphs 300/2000 --epoch-graph rmat:... --parts products   shows that it runs
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
from kernels import csr, error, machine, save
from rivals import run_pyg
from torch import Tensor

import weft
from weft.config.optimisations import Optimisations
from weft.data import Adjacency
from weft.kernels import Scale, attend, ops, spmm, spmm_transposed
from weft.training.cuda_graph import MAX_EDGES
from weft.utils.units import format_bytes

TOLERANCE = 1e-3  # of the largest entry: float32 sums of up to a million numbers, whatever their order
HEADS = 4
QUADRANTS = (0.57, 0.19, 0.19)  # of R-MAT, as in weft.data.io.generate
SECONDS = {"tests": 240, "rates": 15, "products": 70, "attention": 90, "epochs": 70, "offload": 25}
"""How long each part may take: together, and with the build before them, below nine minutes."""
CORA = "sbm:vertices=2708,degree=4,features=1433,classes=7"
ROUNDS, WARMUPS = 7, 2

Work = Callable[[], object]
Emit = Callable[..., None]


def main() -> int:
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
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
    parser.add_argument("--parts", default=",".join(SECONDS), help=f"of {', '.join(SECONDS)}")
    parser.add_argument("--device", default="cuda", help="cpu: to show that all runs, on small graphs")
    parser.add_argument("--graphs", default="300000/15500000,2400000/124000000", help="R-MAT: vertices/edges")
    parser.add_argument("--widths", default="16,64,128,256")
    parser.add_argument("--epoch-graph", default="rmat:vertices=200k,edges=4.65m,features=128,classes=40")
    parser.add_argument("--rows", type=int, default=4_000_000, help="of the host's table, 64 float32 each")
    parser.add_argument(
        "--workers", type=int, default=12, help="processes of the tests, most of whose time is compiling"
    )
    parser.add_argument("--out", help="a name: writes benchmarks/results/NAME.json and NAME.txt")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_a_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The rows of a part, what it said last, and how it ended."""
    given = {"device": options.device, "graphs": options.graphs, "widths": options.widths, "rows": options.rows}
    given |= {"epoch-graph": options.epoch_graph, "workers": options.workers, "part": name}
    given["until"] = time.time() + 0.9 * SECONDS[name]
    command = [sys.executable, __file__, *(f"--{key}={value}" for key, value in given.items())]
    begin = time.perf_counter()
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS[name], check=False)
        out, errors, code = ended.stdout, ended.stderr, str(ended.returncode)
    except subprocess.TimeoutExpired as late:
        out, errors = ((text or b"").decode(errors="replace") for text in (late.stdout, late.stderr))  # type: ignore[union-attr]
        code = "out of time"
    lines = out.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    print(f"{name}: {len(rows)} rows, exit code {code}", flush=True)
    return {"rows": rows, "exit_code": code, "seconds": time.perf_counter() - begin, "errors": errors[-4000:]}


def run_part(options: argparse.Namespace) -> int:
    """Prints a JSON object for each row."""

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
    def run() -> None:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--numprocesses={options.workers}", "tests"]
        # pytest-benchmark, where it is installed, warns that it is switched off beside xdist, and warnings are errors.
        command += ["-p", "no:benchmark"]
        root = Path(__file__).parent.parent
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
        emit(what="tests", passed=ended.returncode == 0, said=ended.stdout[-8000:])

    yield "tests", run


def rates(options: argparse.Namespace, emit: Emit) -> Steps:
    """What memory and the bus do at best, in bytes a second."""
    size = options.rows * 64

    def copies() -> None:
        one = torch.rand(size, device=options.device)
        other = torch.empty_like(one)
        host = pinned(torch.rand(size), options.device)
        for name, work, num_bytes in (
            ("device copy", lambda: other.copy_(one), 8 * size),
            ("host to device", lambda: one.copy_(host, non_blocking=True), 4 * size),
            ("device to host", lambda: host.copy_(one, non_blocking=True), 4 * size),
        ):
            emit(what=name, contender="torch", rate=num_bytes / seconds_of(work, options.device))

    yield "copies", copies


def products(options: argparse.Namespace, emit: Emit) -> Steps:
    """Sums of neighbours' rows, forward and backward, and GCN's with its factors and loops."""
    for name in options.graphs.split(","):
        adj = rmat(*map(int, name.split("/")), options.device)
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
    """weft scales and adds loops in the kernel; cuSPARSE's matrix has the factors, and its loops are added behind."""
    x = torch.rand(adj.num_sources, width, device=device)
    root = (adj.degree + 1).float().rsqrt()
    scale = Scale(source=root, target=root, loop=root * root)
    source, target = adj.edges()
    values = root[source] * root[target]
    del source, target
    matrix = csr(adj.indptr, adj.indices, values, adj.num_sources, torch.int32)
    loops = (root * root)[:, None]
    contenders = {
        "weft": lambda: spmm(adj, x, scale=scale),
        "cusparse": lambda: torch.sparse.mm(matrix, x).addcmul_(x, loops),
    }
    contest("gcn", contenders, emit, device, contenders["cusparse"]())


def attention(options: argparse.Namespace, emit: Emit) -> Steps:
    """GAT's aggregate of four heads, forward, and forward and backward."""
    for name in options.graphs.split(","):
        adj = rmat(*map(int, name.split("/")), options.device)
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
        found: Tensor = pyg().scatter(rows, target, dim_size=adj.num_targets)
        return found.view(-1, width)

    ways = {"weft": lambda: attend(adj, *inputs, bounds=bounds), "pyg-edges": theirs}

    def forward(way: Callable[[], Tensor]) -> Tensor:
        with torch.no_grad():
            return way()

    def both(way: Callable[[], Tensor]) -> Tensor:
        return torch.cat([found.flatten() for found in torch.autograd.grad(way(), inputs, grad)])

    truth = forward(ways["weft"])
    contest("attention", {name: partial(forward, way) for name, way in ways.items()}, emit, device, truth)
    del truth
    contest("attention and backward", {name: partial(both, way) for name, way in ways.items()}, emit, device, None)


def epochs(options: argparse.Namespace, emit: Emit) -> Steps:
    """Training epochs with weft's weights in every contender; and of a graph as large as Cora, where launches count."""
    for graph_name, models in ((options.epoch_graph, ("gcn", "sage", "gat")), (CORA, ("gcn", "gat"))):
        graph = load(graph_name)
        for kind in models:
            about = {"what": f"{'small ' * (graph_name == CORA)}epoch {kind}", "graph": graph_name}
            yield f"{kind} {graph_name}", partial(train, graph, kind, partial(emit, **about), options.device)


def train(graph: weft.Graph, kind: str, emit: Emit, device: str) -> None:
    torch.manual_seed(0)
    model = weft.nn.make_model(kind, graph.num_features, graph.num_classes, dropout=0.0, hidden=256, heads=HEADS)
    makers = {
        "weft": lambda own: loop("single", graph, own, Optimisations(), device),
        "pyg-edges": lambda own: run_pyg(graph, own, "pyg-edges", device),
    }
    if kind != "gat":  # PyG's attention has no product of a CSR matrix
        makers["pyg-csr"] = lambda own: run_pyg(graph, own, "pyg-csr", device)
    if graph.num_edges <= MAX_EDGES:  # larger ones are not captured
        makers["weft-without-capture"] = lambda own: loop("single", graph, own, Optimisations(capture=False), device)
    truth: Tensor | None = None
    for name, make in makers.items():
        with row_of(emit, contender=name) as row:
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            epoch, logits = make(copy.deepcopy(model))
            with torch.no_grad():
                found = logits().detach()
            truth = found if truth is None else truth
            if (differ := error(found, truth)) > TOLERANCE:
                row["differs"] = differ
            row["seconds"] = seconds_of(epoch, device)
            if device == "cuda":
                row["peak_bytes"] = torch.cuda.max_memory_allocated()


def offload(options: argparse.Namespace, emit: Emit) -> Steps:
    """Rows of a host's table to a GPU's slots: as offload brings them today, and read over the bus by the kernel."""

    def gathers() -> None:
        from weft.runtime.streams import Staging, streams_of
        from weft.storage.host_rows import MemoryRows

        width, count = 64, options.rows // 2
        device = torch.device(options.device)
        table = MemoryRows(options.rows, width, torch.float32, torch.device("cpu"), Staging(streams_of(device)))
        table.tensor().uniform_()
        rows = torch.randperm(options.rows)[:count].sort().values
        out, there = torch.empty(count, width, device=device), rows.to(device)
        ways: dict[str, Work] = {"as today": lambda: table.gather(rows, out)}
        if device.type == "cuda" and (kernels := ops.triton_backend()) is not None:
            ways["kernel"] = lambda: kernels.gather_rows(table.tensor(), there, out)  # type: ignore[attr-defined]
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


def contest(
    what: str, contenders: dict[str, Callable[[], Tensor]], emit: Emit, device: str, truth: Tensor | None
) -> None:
    """A row for each: its seconds, and how much it differs from the truth; what does not fit has none."""
    for name, work in contenders.items():
        with row_of(emit, what=what, contender=name) as row:
            if truth is not None and (differ := error(work(), truth)) > TOLERANCE:
                row["differs"] = differ
            row["seconds"] = seconds_of(work, device)


@contextmanager
def row_of(emit: Emit, **row: Any) -> Iterator[dict[str, Any]]:
    """A row that is filled; what fails says why, and the next one goes on."""
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
    """The median of some rounds after others that warm up, by events on a GPU."""
    found = []
    for number in range(WARMUPS + ROUNDS):
        seconds = by_events(work) if device == "cuda" else by_clock(work)
        if number >= WARMUPS:
            found.append(seconds)
    return statistics.median(found)


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
    """PyG's functions, whose own layers use them."""
    import torch_geometric.utils

    return torch_geometric.utils


def pinned(rows: Tensor, device: str) -> Tensor:
    return rows.pin_memory() if device == "cuda" else rows


def rmat(vertices: int, edges: int, device: str) -> Adjacency:
    """An R-MAT graph, drawn where it is to be."""
    generator = torch.Generator(device).manual_seed(0)
    kept, missing = [], edges
    while missing > 0:
        size = min(2 * missing, 1 << 26)
        source = torch.zeros(size, dtype=torch.int64, device=device)
        target = torch.zeros_like(source)
        for _ in range((vertices - 1).bit_length()):
            drawn = torch.rand(size, generator=generator, device=device)
            a, ab, abc = QUADRANTS[0], sum(QUADRANTS[:2]), sum(QUADRANTS)
            target = target * 2 + (drawn >= ab)
            source = source * 2 + (((drawn >= a) & (drawn < ab)) | (drawn >= abc))
        there = (source < vertices) & (target < vertices)
        kept.append((target * vertices + source)[there][:missing])
        missing -= len(kept[-1])
    key = torch.cat(kept).sort().values
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
"""What is to be at least so many times as fast as what."""


def aims(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How each aim is met wherever both contenders were measured and do not differ."""
    found = []
    for name, what, ours, theirs, least in AIMS:
        for one, ratio in ratios(rows, what, what, ours, theirs):
            found.append({"aim": name, **one, "least": least, "ratio": ratio, "met": ratio >= least})
    for one, ratio in ratios(rows, "attention and backward", "attention", "weft", "weft"):
        found.append({"aim": "backward by forward, at most", **one, "least": 1.5, "ratio": 1 / ratio - 1})
        found[-1]["met"] = found[-1]["ratio"] <= 1.5
    bus = [row["rate"] for row in rows if row["what"] == "host to device"]
    for row in rows:
        if row["what"] == "rows to slots" and bus and "rate" in row:
            share = row["rate"] / bus[0]
            aim = f"offload's share of the bus, {row['contender']}"
            found.append({"aim": aim, "least": 0.8, "ratio": share, "met": share >= 0.8})
    return found


def ratios(
    rows: Sequence[dict[str, Any]], of: str, to: str, ours: str, theirs: str
) -> Iterator[tuple[dict[str, Any], float]]:
    """Their seconds by ours, of rows of the same graph and width."""
    timed = {
        (row["what"], row["contender"], row.get("graph"), row.get("width")): row["seconds"]
        for row in rows
        if "seconds" in row and "differs" not in row
    }
    for (what, contender, graph, width), seconds in timed.items():
        if (what, contender) == (of, ours) and (other := timed.get((to, theirs, graph, width))):
            yield {"graph": graph, "width": width}, other / seconds


def table(results: dict[str, Any], met: list[dict[str, Any]]) -> Iterator[str]:
    """All rows, then the aims."""
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
                text += f" {row['gathered_bytes'] / row['seconds'] / copies[0]:6.2f} of a copy's rate"
            for key in ("differs", "missing", "passed"):
                text += f" {key}: {row[key]}" if key in row else ""
            yield text
    yield "== aims"
    for aim in met:
        about = " ".join(str(aim[key]) for key in ("graph", "width") if aim.get(key) is not None)
        said = "met" if aim["met"] else "NOT met"
        yield f"{aim['aim']:<36} {about:<50} {aim['ratio']:7.2f} (aim {aim['least']}) {said}"


def gpu(device: str) -> dict[str, Any]:
    """What it is."""
    if device != "cuda":
        return {"name": "none"}
    known = torch.cuda.get_device_properties(0)
    backend = ops.backend_of(torch.zeros(1, device=device))
    return {
        "name": known.name,
        "bytes": known.total_memory,
        "cuda": torch.version.cuda,
        "kernels": str(getattr(backend, "__name__", backend)),
        **machine(),
    }


if __name__ == "__main__":
    sys.exit(main())
