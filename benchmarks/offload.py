"""Measure training beyond the device's memory: time against `single`, memory, and how exact the estimates are.

python benchmarks/offload.py time --graphs "topo_cnr-2000;topo_soc-Slashdot0902" --models gcn,gat --chunks 8
python benchmarks/offload.py forecast --graphs topo_cnr-2000 --models gcn,sage,gin,gat --limits 64MB,#8
python benchmarks/offload.py memory --graph rmat:vertices=500k,edges=5m,features=128,classes=16 --limits 64MB,128MB
python benchmarks/offload.py predict --graph coauthor_physics --limits 64MB,256MB --epochs 1

time       contenders take turns with training steps in one process, after their logits have been compared. A
           contender is single or offload#CHUNKS, with - and an optimisation to disable.
forecast   the estimates of a training step against its live tensors (those of the loader thread included) and the
           bytes that it transfers
memory     the resident memory of a training process on a stored graph, less that of the same command on a graph of
           500 vertices
predict    as memory, for `weft predict`, with a model that was trained on the 500 vertices
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from kernels import save
from steps import make_plan, train_step, whole_step

import weft
from weft.comm import Group
from weft.config.config import Config
from weft.config.optimisations import ALL_OPTIMISATIONS, Optimisations
from weft.data import Graph
from weft.nn import Workload, make_model
from weft.runtime.memory.heap import keep_freed_memory
from weft.runtime.memory.tensor_peak import TensorPeak
from weft.strategies import Step
from weft.strategies.offload.placed import PlacedOffload
from weft.training.tasks.task import make_task
from weft.utils.units import format_bytes, parse_bytes

TOLERANCE = 1e-3  # of float32 logits, relative to the largest: contenders sum in different orders
CLASSES = 16
TINY_GRAPH = "rmat:vertices=500,edges=5k,features={},classes=16"


def main() -> int:
    options = parse()
    rows = {"time": times, "forecast": forecasts, "memory": memories, "predict": predictions}[options.what](options)
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})
    return 0


class Contender:
    """A strategy with a placed model, of which it can run training steps."""

    def __init__(self, name: str, graph: Graph, model: str, options: argparse.Namespace) -> None:
        self.name = name
        kind, _, without = name.partition("-")
        strategy, _, chunks = kind.partition("#")
        work = make_work(graph, model, options, Optimisations.without(without))
        plan = make_plan(strategy, work, chunks=int(chunks or 0), intermediates=options.intermediates)
        self.placed = plan.place(Group())
        self.task = make_task(Config(), self.placed)

    def logits(self) -> torch.Tensor:
        return self.placed.forward(Step(epoch=0, training=False)).clone()

    def step(self, epoch: int) -> float:
        """Run a training step and return its seconds."""
        start = time.perf_counter()
        self.placed.model.zero_grad()
        train_step(self.placed, self.task, whole_step(self.placed, epoch))
        return time.perf_counter() - start


def make_work(
    graph: Graph, model: str, options: argparse.Namespace, optimisations: Optimisations = ALL_OPTIMISATIONS
) -> Workload:
    """Return the workload of a model, whose sizes are those of the options; its initial weights are always the same."""
    torch.manual_seed(0)
    sizes = {"hidden": options.hidden, "layers": options.layers, "heads": 4}
    return Workload(make_model(model, graph.num_features, graph.num_classes, **sizes), graph, optimisations)


def times(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time each graph and model under each contender."""
    keep_freed_memory()
    rows = []
    for name in options.graphs.split(";"):
        graph = weft.load(name, random_features=options.features, random_classes=CLASSES)
        for model in options.models.split(","):
            names = ["single", *(f"offload#{chunks}" for chunks in options.chunks.split(","))]
            contenders = race([Contender(contender, graph, model, options) for contender in names], options.rounds)
            rows.append({"graph": name, "model": model, "contenders": contenders})
            print(f"{name} {model}")
            for contender, row in contenders.items():
                print(
                    f"  {contender:24} {row['seconds']:7.3f} s ({row['least']:.3f} to {row['most']:.3f})"
                    f"  {row['ratio']:5.2f}x single ({row['least_ratio']:.2f} to {row['most_ratio']:.2f})",
                    flush=True,
                )
    return rows


def race(contenders: list[Contender], rounds: int) -> dict[str, dict[str, float]]:
    """Compare the logits of the contenders, run training steps in turns, and return their times by contender."""
    expected = contenders[0].logits()
    for contender in contenders[1:]:
        gap = float((contender.logits() - expected).abs().max() / expected.abs().max())
        assert gap < TOLERANCE, f"{contender.name}: logits differ by {gap:.1e} of the largest"
    for contender in contenders:
        for epoch in range(2):
            contender.step(epoch)
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for epoch in range(rounds):
        for contender in contenders:
            seconds[contender.name].append(contender.step(epoch))
    first = seconds[contenders[0].name]
    return {name: figures(each, [a / b for a, b in zip(each, first, strict=True)]) for name, each in seconds.items()}


def figures(seconds: list[float], ratios: list[float]) -> dict[str, float]:
    return {
        "seconds": statistics.median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
    }


def forecasts(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare the estimates of each graph, model and limit with the memory and the transfers of a training step."""
    rows = []
    for name in options.graphs.split(";"):
        graph = weft.load(name, random_features=options.features, random_classes=CLASSES)
        for model in options.models.split(","):
            for limit in options.limits.split(","):
                row = {"graph": name, "model": model, "limit": limit, **followed(graph, model, limit, options)}
                rows.append(row)
                gap = row["device"] / row["seen"] - 1
                print(
                    f"{name:20} {model:6} {limit:>6} {row['chunks']:5} chunks  device {format_bytes(row['device'])}"
                    f" estimated {format_bytes(row['seen'])} measured ({gap:+.1%})  "
                    f"bytes to device + to host {row['to_device']:,} + {row['to_host']:,} estimated "
                    f"{row['moved'][0]:,} + {row['moved'][1]:,} counted; a step takes {row['seconds']:.2f} s",
                    flush=True,
                )
    return rows


def followed(graph: Graph, model: str, limit: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run training steps under a limit, and return the estimate, the peak of the live tensors and the transfers.

    Args:
        graph: The graph.
        model: Name of the model.
        limit: Device memory, such as 64MB, or # and a number of chunks.
        options: The command line options.
    """
    cut = {"chunks": int(limit[1:])} if limit[0] == "#" else {"device_memory": parse_bytes(limit, "--limits")}
    group, work = Group(), make_work(graph, model, options)
    plan = make_plan("offload", work, intermediates=options.intermediates, **cut)
    (estimate,) = plan.state()["estimates"]
    placed = plan.place(group)
    assert isinstance(placed, PlacedOffload)
    task = make_task(Config(), placed)
    peak = TensorPeak()
    placed.chunks.__dict__["_loader"] = ThreadPoolExecutor(1, initializer=peak.__enter__)
    peak_bytes = kept_bytes = 0
    for epoch in range(2):
        group.meter.take("train")
        kept_bytes = peak.alive  # tensors by vertex that are created once, in host memory
        placed.model.zero_grad()
        with group.meter.during("train"), peak:
            logits = placed.forward(step := Step(epoch=epoch, training=True))
        peak_bytes = max(peak_bytes, peak.most) if epoch else 0
        grad = task.loss(logits, step)[1]
        with group.meter.during("train"), peak:
            peak.moments = [peak.alive]
            placed.backward(logits, grad)
        peak_bytes = max(peak_bytes, peak.most)
        peak.moments = [peak.alive]
    counts = group.meter.take("train")
    start = time.perf_counter()
    train_step(placed, task, whole_step(placed, 2))
    seconds = time.perf_counter() - start
    moved = counts.to_device.total(), counts.to_host.total()
    return {**estimate, "seen": peak_bytes - kept_bytes, "held": kept_bytes, "moved": moved, "seconds": seconds}


def memories(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train each model under each limit in new processes, and compare their memory with limit and estimate."""
    rows = []
    print(
        "model   limit     chunks estimated device  host    scratch  data/limit  tiny  resident  of declared  epoch s"
    )
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        store = Path(folder) / "graph"
        weft.load(options.graph).save(store)
        tiny = Path(folder) / "tiny"
        weft.load(TINY_GRAPH.format(options.features)).save(tiny)
        for model in options.models.split(","):
            for limit in options.limits.split(","):
                row = watched(store, tiny, model, limit, options, Path(folder))
                rows.append(row)
                print(
                    f"{model:6} {limit:>8} {row['chunks']:8} {format_bytes(row['device']):>12}"
                    f"{format_bytes(row['host']):>12} {format_bytes(row['disk']):>9} {row['data_ratio']:9.1f}x"
                    f" {format_bytes(row['own']):>8} {format_bytes(row['resident']):>8} {row['share']:9.2f}"
                    f" {row['epoch_seconds']:9.2f}",
                    flush=True,
                )
    return rows


def watched(
    store: Path, tiny: Path, model: str, limit: str, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Train on a stored graph in a new process, and return the estimate and the peak of its resident memory.

    Args:
        store: Folder of the graph.
        tiny: Folder of a tiny graph, whose training shows the memory of the process itself.
        model: Name of the model.
        limit: Device memory, such as 64MB.
        options: The command line options.
        folder: Folder for the runs.
    """
    baseline, _ = run(tiny, model, limit, options, folder)
    resident, records = run(store, model, limit, options, folder)
    estimate = records[0]["placement"][0]["forecast"]
    epochs = [record for record in records if record["kind"] == "epoch"]
    declared = parse_bytes(limit, "--limits") + estimate["host"]
    files = sum(path.stat().st_size for path in store.glob("x*.npy"))
    return {
        "model": model,
        "limit": parse_bytes(limit, "--limits"),
        **estimate,
        "own": baseline,
        "resident": resident,
        "share": (resident - baseline) / declared,
        "data_ratio": (estimate["disk"] + files) / parse_bytes(limit, "--limits"),
        "epoch_seconds": statistics.median(record["seconds"] for record in epochs),
    }


def run(
    graph: Path, model: str, limit: str, options: argparse.Namespace, folder: Path
) -> tuple[int, list[dict[str, Any]]]:
    """Train in a new process, and return the peak of its resident memory in bytes and the records of the run."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    command = [sys.executable, "-m", "weft", "train", graph, "--model", model, "--out", out]
    command += ["--strategy", "offload", "--device-memory", limit, "--epochs", options.epochs]
    command += ["--hidden", options.hidden, "--layers", options.layers, "--intermediates", options.intermediates]
    command += ["--eval-every", options.epochs, "--checkpoint-every", 0]
    peak_bytes = watch(command, out.with_suffix(".log"))
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return peak_bytes, records


def predictions(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Predict with each model under each limit in new processes, and compare their memory with limit and estimate."""
    rows = []
    print("model   limit     chunks estimated device  host    scratch   tiny  resident  of declared")
    with tempfile.TemporaryDirectory(prefix="weft-") as name:
        folder = Path(name)
        graph, store, tiny = weft.load(options.graph), folder / "graph", folder / "tiny"
        graph.save(store)
        weft.load(f"rmat:vertices=500,edges=5k,features={graph.num_features},classes={graph.num_classes}").save(tiny)
        for model in options.models.split(","):
            sizes = {"hidden": options.hidden, "layers": options.layers}
            trained = weft.train(str(tiny), model, out=folder / model, epochs=1, quiet=True, **sizes)
            for limit in options.limits.split(","):
                device = parse_bytes(limit, "--limits")
                plan = make_plan("offload", Workload(trained.model, graph), device_memory=device)
                (estimate,) = plan.state()["estimates"]
                baseline, resident = (watched_prediction(trained.folder, path, limit, folder) for path in (tiny, store))
                share = (resident - baseline) / (device + estimate["host"])
                rows.append(
                    {"model": model, "limit": device, **estimate, "own": baseline, "resident": resident, "share": share}
                )
                print(
                    f"{model:6} {limit:>8} {estimate['chunks']:8} {format_bytes(estimate['device']):>12}"
                    f"{format_bytes(estimate['host']):>12} {format_bytes(estimate['disk']):>9}"
                    f" {format_bytes(baseline):>8} {format_bytes(resident):>8} {share:9.2f}",
                    flush=True,
                )
    return rows


def watched_prediction(run: Path, graph: Path, limit: str, folder: Path) -> int:
    """Predict in a new process, and return the peak of its resident memory in bytes."""
    command = [sys.executable, "-m", "weft", "predict", run, graph, "--out", folder / "rows.npy", "--overwrite"]
    return watch([*command, "--strategy", "offload", "--device-memory", limit], folder / "log")


def watch(command: list[Any], log: Path) -> int:
    """Run a command to its end, and return the peak of its resident memory in bytes.

    Raises:
        SystemExit: The command fails; the message is its output.
    """
    peak_bytes = 0
    with log.open("w") as output, subprocess.Popen([*map(str, command)], stdout=output, stderr=output) as process:
        while process.poll() is None:
            peak_bytes = max(peak_bytes, memory(process.pid))
            time.sleep(3e-3)
    if process.returncode:
        raise SystemExit(log.read_text())
    return peak_bytes


def memory(pid: int) -> int:
    """Return the resident memory of a process in bytes, mapped files included; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"VmRSS:\s+(\d+) kB", text)
    return int(match.group(1)) * 1024 if match else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "forecast", "memory", "predict"))
    parser.add_argument("--graphs", default="topo_cnr-2000")
    parser.add_argument("--graph", default="rmat:vertices=500k,edges=5m,features=128,classes=16")
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--models", default="gcn,gat")
    parser.add_argument("--chunks", default="8")
    parser.add_argument("--limits", default="96MB")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--intermediates", default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", default="", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
