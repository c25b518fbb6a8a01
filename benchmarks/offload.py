"""Training beyond the device's memory: time against `single`, memory seen from outside, and what was forecast.

    python benchmarks/offload.py time --graphs "topo_cnr-2000;topo_soc-Slashdot0902" --models gcn,gat --chunks 8
    python benchmarks/offload.py forecast --graphs topo_cnr-2000 --models gcn,sage,gin,gat --limits 64MB,#8
    python benchmarks/offload.py memory --graph rmat:vertices=500k,edges=5m,features=128,classes=16 --limits 64MB,128MB
    python benchmarks/offload.py predict --graph coauthor_physics --limits 64MB,256MB --epochs 1

time: contenders take turns with training steps in one process, after their logits have been compared; a contender is
single or offload#CHUNKS, with - and an optimisation that it is to do without. forecast: a training step whose tensors
are followed, those of the loader too, and whose bytes are counted. memory: each run is a process of its own on a graph
in a store, whose resident memory is watched; from it goes what the same command has on a graph of few vertices.
predict: the same of `weft predict`, with the model of a run on the few vertices.
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
from weft.runtime.memory import keep_freed_memory
from weft.runtime.tensor_peak import TensorPeak
from weft.strategies import Step
from weft.training.tasks.task import make_task
from weft.utils.units import format_bytes, parse_bytes

TOLERANCE = 1e-3  # of float32 logits, relative to the largest: contenders sum in different orders
CLASSES = 16
FEW = "rmat:vertices=500,edges=5k,features={},classes=16"


def main() -> int:
    options = parse()
    rows = {"time": times, "forecast": forecasts, "memory": memories, "predict": predictions}[options.what](options)
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})
    return 0


class Contender:
    """A strategy that can do training steps of a model."""

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
        """Seconds of a training step."""
        start = time.perf_counter()
        self.placed.model.zero_grad()
        train_step(self.placed, self.task, whole_step(self.placed, epoch))
        return time.perf_counter() - start


def make_work(
    graph: Graph, model: str, options: argparse.Namespace, optimisations: Optimisations = ALL_OPTIMISATIONS
) -> Workload:
    """A model of the sizes that were asked for, always with the same weights."""
    torch.manual_seed(0)
    sizes = {"hidden": options.hidden, "layers": options.layers, "heads": 4}
    return Workload(make_model(model, graph.num_features, graph.num_classes, **sizes), graph, optimisations)


def times(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each graph and model under each contender."""
    keep_freed_memory()
    rows = []
    for name in options.graphs.split(";"):
        graph = weft.load(name, random_features=options.features, random_classes=CLASSES)
        for model in options.models.split(","):
            names = ["single", *(f"offload#{chunks}" for chunks in options.chunks.split(","))]
            found = race([Contender(one, graph, model, options) for one in names], options.rounds)
            rows.append({"graph": name, "model": model, "contenders": found})
            print(f"{name} {model}")
            for one, row in found.items():
                print(
                    f"  {one:24} {row['seconds']:7.3f} s ({row['least']:.3f} to {row['most']:.3f})"
                    f"  {row['ratio']:5.2f}x single ({row['least_ratio']:.2f} to {row['most_ratio']:.2f})",
                    flush=True,
                )
    return rows


def race(contenders: list[Contender], rounds: int) -> dict[str, dict[str, float]]:
    """Steps in turn, after all contenders have given the same logits."""
    expected = contenders[0].logits()
    for one in contenders[1:]:
        gap = float((one.logits() - expected).abs().max() / expected.abs().max())
        assert gap < TOLERANCE, f"{one.name}: logits differ by {gap:.1e} of the largest"
    for one in contenders:
        for epoch in range(2):
            one.step(epoch)
    seconds: dict[str, list[float]] = {one.name: [] for one in contenders}
    for epoch in range(rounds):
        for one in contenders:
            seconds[one.name].append(one.step(epoch))
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
    """Each graph and model under each limit: what was foreseen, and what a step took and moved."""
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
                    f" forecast {format_bytes(row['seen'])} seen ({gap:+.1%})  moved {row['to_device']:,} +"
                    f" {row['to_host']:,} forecast {row['moved'][0]:,} + {row['moved'][1]:,} counted; a step takes"
                    f" {row['seconds']:.2f} s",
                    flush=True,
                )
    return rows


def followed(graph: Graph, model: str, limit: str, options: argparse.Namespace) -> dict[str, Any]:
    """A training step under a limit, all of whose tensors are followed."""
    cut = {"chunks": int(limit[1:])} if limit[0] == "#" else {"device_memory": parse_bytes(limit, "--limits")}
    group, work = Group(), make_work(graph, model, options)
    plan = make_plan("offload", work, intermediates=options.intermediates, **cut)
    (foreseen,) = plan.state()["estimates"]
    placed = plan.place(group)
    task = make_task(Config(), placed)
    peak = TensorPeak()
    placed.chunks.__dict__["_loader"] = ThreadPoolExecutor(1, initializer=peak.__enter__)
    most = held = 0
    for epoch in range(2):
        group.meter.take("train")
        held = peak.alive  # numbers by vertex, made once: memory of the host
        placed.model.zero_grad()
        with group.meter.during("train"), peak:
            logits = placed.forward(step := Step(epoch=epoch, training=True))
        most = max(most, peak.most) if epoch else 0
        grad = task.loss(logits, step)[1]
        with group.meter.during("train"), peak:
            peak.moments = [peak.alive]
            placed.backward(logits, grad)
        most = max(most, peak.most)
        peak.moments = [peak.alive]
    counts = group.meter.take("train")
    start = time.perf_counter()
    train_step(placed, task, whole_step(placed, 2))
    seconds = time.perf_counter() - start
    moved = counts.to_device.total(), counts.to_host.total()
    return {**foreseen, "seen": most - held, "held": held, "moved": moved, "seconds": seconds}


def memories(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each model under each limit."""
    rows = []
    print(
        "model   limit     chunks  forecast device  host    scratch  data/limit  own   resident  of declared  epoch s"
    )
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        store = Path(folder) / "graph"
        weft.load(options.graph).save(store)
        few = Path(folder) / "few"
        weft.load(FEW.format(options.features)).save(few)
        for model in options.models.split(","):
            for limit in options.limits.split(","):
                row = watched(store, few, model, limit, options, Path(folder))
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
    store: Path, few: Path, model: str, limit: str, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """One run, its forecast, and the most that its process had resident, above what few vertices take."""
    own, _ = run(few, model, limit, options, folder)
    resident, records = run(store, model, limit, options, folder)
    said = records[0]["placement"][0]["forecast"]
    epochs = [one for one in records if one["kind"] == "epoch"]
    declared = parse_bytes(limit, "--limits") + said["host"]
    files = sum(path.stat().st_size for path in store.glob("x*.npy"))
    return {
        "model": model,
        "limit": parse_bytes(limit, "--limits"),
        **said,
        "own": own,
        "resident": resident,
        "share": (resident - own) / declared,
        "data_ratio": (said["disk"] + files) / parse_bytes(limit, "--limits"),
        "epoch_seconds": statistics.median(one["seconds"] for one in epochs),
    }


def run(
    graph: Path, model: str, limit: str, options: argparse.Namespace, folder: Path
) -> tuple[int, list[dict[str, Any]]]:
    """A run as a process: the most that it had resident, and its records."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    command = [sys.executable, "-m", "weft", "train", graph, "--model", model, "--out", out]
    command += ["--strategy", "offload", "--device-memory", limit, "--epochs", options.epochs]
    command += ["--hidden", options.hidden, "--layers", options.layers, "--intermediates", options.intermediates]
    command += ["--eval-every", options.epochs, "--checkpoint-every", 0]
    most = watch(command, out.with_suffix(".log"))
    records = [json.loads(one) for one in (out / "metrics.jsonl").read_text().splitlines()]
    return most, records


def predictions(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Predictions of each model under each limit, in processes that are watched."""
    rows = []
    print("model   limit     chunks  forecast device  host    scratch   own   resident  of declared")
    with tempfile.TemporaryDirectory(prefix="weft-") as name:
        folder = Path(name)
        graph, store, few = weft.load(options.graph), folder / "graph", folder / "few"
        graph.save(store)
        weft.load(f"rmat:vertices=500,edges=5k,features={graph.num_features},classes={graph.num_classes}").save(few)
        for model in options.models.split(","):
            sizes = {"hidden": options.hidden, "layers": options.layers}
            trained = weft.train(str(few), model, out=folder / model, epochs=1, quiet=True, **sizes)
            for limit in options.limits.split(","):
                device = parse_bytes(limit, "--limits")
                plan = make_plan("offload", Workload(trained.model, graph), device_memory=device)
                (said,) = plan.state()["estimates"]
                own, resident = (watched_prediction(trained.folder, one, limit, folder) for one in (few, store))
                share = (resident - own) / (device + said["host"])
                rows.append({"model": model, "limit": device, **said, "own": own, "resident": resident, "share": share})
                print(
                    f"{model:6} {limit:>8} {said['chunks']:8} {format_bytes(said['device']):>12}"
                    f"{format_bytes(said['host']):>12} {format_bytes(said['disk']):>9} {format_bytes(own):>8}"
                    f" {format_bytes(resident):>8} {share:9.2f}",
                    flush=True,
                )
    return rows


def watched_prediction(run: Path, graph: Path, limit: str, folder: Path) -> int:
    """The most that a prediction's process has resident."""
    command = [sys.executable, "-m", "weft", "predict", run, graph, "--out", folder / "rows.npy", "--overwrite"]
    return watch([*command, "--strategy", "offload", "--device-memory", limit], folder / "log")


def watch(command: list[Any], log: Path) -> int:
    """Runs a command to its end: the most bytes that its process had resident."""
    most = 0
    with log.open("w") as said, subprocess.Popen([*map(str, command)], stdout=said, stderr=said) as process:
        while process.poll() is None:
            most = max(most, memory(process.pid))
            time.sleep(3e-3)
    if process.returncode:
        raise SystemExit(log.read_text())
    return most


def memory(pid: int) -> int:
    """The bytes that a process has resident, files that it maps among them; 0 once it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    return int(found.group(1)) * 1024 if found else 0


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
    parser.add_argument("--out", default="")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
