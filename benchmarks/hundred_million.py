"""Train a GNN on a citation graph with 111 million vertices and 1.6 billion edges, on one machine, stage by stage.

    python benchmarks/hundred_million.py --folder /data/cites --out hundred-million-NAME
    python benchmarks/hundred_million.py --folder /tmp/cites --scale 0.01
    python benchmarks/hundred_million.py --folder /tmp/all --scale 0.1 --labelled 100% --feature-dtype bfloat16 \
        --runs gcn-2-5 --train "--dtype bfloat16 --eval-every 5"

Each stage is a command of weft: import, for each run training with an evaluation in every epoch, and the prediction of
all vertices by the first run. It runs in a memory cgroup whose limit includes the page cache, if this process may
create one (version 1); the results say whether. A stage that has ended is not repeated for the same command, so the
script can be stopped and started again. The graph is `cites:` (docs/decisions/0054), of which --scale takes a share.
The table states for each stage seconds, the most anonymous memory of all its processes together, and the bytes that it
read from the disk and wrote to it. An epoch must read as many bytes of files as planned, be they on the disk or in the
page cache. The rates of the disk, of random rows in memory and of dense products are measured first. If all vertices
are labelled, an epoch skips nothing, and is compared with what these rates allow.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernels import save

from weft.data import Graph
from weft.utils.units import parse_bytes

VERTICES, EDGES, FEATURES, CLASSES = 111_059_956, 1_615_685_872, 128, 172
"""Shape of ogbn-papers100M (Hu et al., Open Graph Benchmark, 2020)."""
HIDDEN = 128
"""Hidden size of the models."""
FLIPPED = 0.1
"""Share of wrong labels in the graph: no model can be more accurate than one minus this share."""
BLOCK, BLOCKS = 8 << 20, 128
"""Bytes of a request, and number of requests, by which the disk is measured."""
TRAINING = "--dtype bfloat16"
"""Options of training."""
PREDICTED_TOLERANCE = 0.002
"""Largest difference between the test accuracies of a run and of its prediction, which round at different places."""
POLL = 0.2
"""Seconds between two readings of the memory."""


def main() -> int:
    options = parse()
    folder = Path(options.folder).absolute()
    stages, graph = folder / "stages", folder / "graph"
    stages.mkdir(parents=True, exist_ok=True)
    rates, results = stage(stages / "rates.json", [], lambda: {"command": [], **disk_rates(folder), **cpu_rates()}), {}
    shape = f"vertices={round(VERTICES * options.scale)},edges={round(EDGES * options.scale)},flipped={FLIPPED}"
    recipe = f"cites:{shape},features={FEATURES},classes={CLASSES},labelled={options.labelled}"
    command = ["data", "import", recipe, "--feature-dtype", options.feature_dtype, "--out", str(graph), "--overwrite"]
    results["import"] = stage(stages / "import.json", command, lambda: measured(command, options.memory))
    print_stage("import", results["import"])
    for sizes in options.runs.split(","):
        model, layers, epochs = sizes.split("-")
        name = f"{model}-{layers}-layers"
        out = stages / name
        command = ["train", str(graph), "--model", model, "--layers", layers, "--hidden", str(HIDDEN)]
        command += ["--epochs", epochs, "--lr", str(options.lr), *options.train.split()]
        command += ["--scratch", str(folder)] if "device-memory" in options.train else []
        command += ["--out", str(out)]
        resume = ["--resume"] if any(out.glob("checkpoints/*")) else []
        run = partial(trained, command, options.memory, resume, out)
        results[name] = stage(stages / f"{name}.json", command, run)
        if options.labelled == "100%" and model == "gcn":
            rows = round(VERTICES * options.scale)
            gathered = results[name]["edges_by_width"] * (2 if "bfloat16" in options.train else 4)
            results[name]["least_seconds"] = least_seconds(rates, rows, int(layers), gathered)
        print_stage(name, results[name])
        if "predict" not in results:
            file, score = folder / "classes.npy", results[name]["test_accuracy"]
            command = ["predict", str(out), "--what", "classes", "--out", str(file), "--overwrite"]
            run = partial(predicted, command, options.memory, file, graph)
            results["predict"] = stage(stages / "predict.json", command, run)
            print_stage("predict", results["predict"])
            if abs(results["predict"]["test_accuracy"] - score) > PREDICTED_TOLERANCE:
                sys.exit(f"the prediction has another test accuracy than the {score:.4f} of the run")
    for name, result in results.items():
        if result.get("file_bytes") != result.get("planned_file_bytes"):
            sys.exit(f"the last epoch of {name} read other bytes of files than planned")
    if options.out:
        rows = [{"stage": name, **result} for name, result in results.items()]
        save(options.out, {"options": vars(options), "best_accuracy": 1 - FLIPPED, "rates": rates, "rows": rows})
    return 0


def stage(path: Path, command: list[str], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a stage from its file, if it is that of the same command; else run it and write the file."""
    if path.exists():
        content: dict[str, Any] = json.loads(path.read_text())
        if content["command"] == command:
            return content
    result = run()
    path.write_text(json.dumps(result))
    return result


def disk_rates(folder: Path) -> dict[str, float]:
    """Return the bytes per second of direct sequential writes and reads of a file of 1 GB."""
    path, block = folder / "rate.tmp", mmap.mmap(-1, BLOCK)
    rates = {}
    for name, flags in (("write", os.O_WRONLY | os.O_CREAT), ("read", os.O_RDONLY)):
        file = os.open(path, flags | os.O_DIRECT)
        begin = time.perf_counter()
        for _ in range(BLOCKS):
            if name == "write":
                os.write(file, block)
            else:
                os.readv(file, [block])
        rates[name] = BLOCK * BLOCKS / (time.perf_counter() - begin)
        os.close(file)
    path.unlink()
    print(f"disk: reads {rates['read'] / 1e9:.2f} GB/s, writes {rates['write'] / 1e9:.2f} GB/s", flush=True)
    return rates


def cpu_rates() -> dict[str, float]:
    """Return the bytes per second of copies of random rows in bfloat16, and the FLOP/s of dense products of rows."""
    table, ids = torch.ones(4_000_000, HIDDEN, dtype=torch.bfloat16), torch.randint(4_000_000, (2_000_000,))
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        rows, weight = torch.ones(200_000, HIDDEN, dtype=dtype), torch.ones(HIDDEN, HIDDEN, dtype=dtype)
        seconds.append(fastest(partial(torch.mm, rows, weight)))
    rates = {
        "gather": ids.numel() * HIDDEN * table.itemsize / fastest(partial(table.index_select, 0, ids)),
        "dense": 2 * rows.numel() * HIDDEN / min(seconds),
    }
    print(f"random rows {rates['gather'] / 1e9:.2f} GB/s, products {rates['dense'] / 1e9:.0f} GFLOP/s", flush=True)
    return rates


def fastest(work: Callable[[], object]) -> float:
    """Return the fewest seconds of five runs."""
    return min(timeit.repeat(work, number=1, repeat=5))


def least_seconds(rates: dict[str, float], rows: int, layers: int, gathered: int) -> dict[str, float]:
    """Return the seconds that gathered rows and dense products of a GCN's training step take at the measured rates.

    Args:
        rates: Result of `cpu_rates`.
        rows: Number of vertices, all of which have rows in each layer.
        layers: Number of layers.
        gathered: Bytes of the rows that the step aggregates, once for each edge.
    """
    widths = [FEATURES, *[HIDDEN] * (layers - 1), CLASSES]
    products = [width * following for width, following in pairwise(widths)]
    flops = 2 * rows * (3 * sum(products) - products[0])  # nobody needs the gradient of the first layer's rows
    return {"gather": gathered / rates["gather"], "dense": flops / rates["dense"]}


def measured(command: list[str], memory: str, resume: Sequence[str] = ()) -> dict[str, Any]:
    """Run a command of weft in a memory cgroup, and return its seconds, memory and disk traffic.

    What an earlier command wrote to its folder `--out` without a checkpoint is removed.

    Args:
        command: Arguments of weft.
        memory: Limit of the cgroup.
        resume: Further arguments, with which the command continues what an earlier one began.
    """
    command_line, out = [*command, *resume], Path(command[command.index("--out") + 1])
    if command[0] == "train" and not resume:
        shutil.rmtree(out, ignore_errors=True)
    print("weft", " ".join(command_line), flush=True)
    before, begin, anonymous, resident = own_io(), time.perf_counter(), 0, 0
    with memory_cgroup(parse_bytes(memory, "--memory")) as cgroup:

        def enter() -> None:
            if cgroup is not None:
                (cgroup / "cgroup.procs").write_text(str(os.getpid()))

        arguments = [sys.executable, "-m", "weft", *command_line]
        environment = os.environ | {"TMPDIR": str(out.parent)}  # for rows beyond the memory
        process = subprocess.Popen(
            arguments, env=environment, preexec_fn=enter, start_new_session=True, stdout=subprocess.DEVNULL
        )
        try:
            while process.poll() is None:
                now = memory_of_session(process.pid)
                anonymous, resident = max(anonymous, now[0]), max(resident, now[1])
                time.sleep(POLL)
        finally:
            if process.poll() is None:  # a signal ends the measurement
                process.terminate()
                process.wait()
    if process.returncode:
        sys.exit(f"weft {command[0]} ended with exit code {process.returncode}")
    after = own_io()
    return {
        "command": command,
        "seconds": time.perf_counter() - begin,
        "anonymous_bytes": anonymous,
        "resident_bytes": resident,
        "read_bytes": after["read_bytes"] - before["read_bytes"],
        "written_bytes": after["write_bytes"] - before["write_bytes"],
        "memory_limit": memory if cgroup is not None else "none",
    }


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Path | None]:
    """Yield a new memory cgroup below that of this process, and remove it afterwards; None if none can be created."""
    match = re.search(r"^\d+:memory:(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    group = Path(f"/sys/fs/cgroup/memory{match.group(1) if match else ''}/weft-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def memory_of_session(session: int) -> tuple[int, int]:
    """Return the anonymous and the resident bytes of all processes of a session."""
    totals = [0, 0]
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if os.getsid(int(status.parent.name)) != session:
                continue
            text = status.read_text()
        except OSError:  # it has ended
            continue
        for number, field in enumerate(("RssAnon", "VmRSS")):
            match = re.search(rf"{field}:\s+(\d+) kB", text)
            totals[number] += 1024 * int(match.group(1)) if match else 0
    return totals[0], totals[1]


def own_io() -> dict[str, int]:
    """Return the bytes that this process and all children that have ended read from the disk and wrote to it."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def trained(command: list[str], memory: str, resume: Sequence[str], out: Path) -> dict[str, Any]:
    """Train, and return what `measured` returns with the epochs and accuracies of the run in `out`."""
    result = measured(command, memory, resume)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    epochs = [record for record in records if record["kind"] == "epoch"]
    summary = next(record for record in reversed(records) if record["kind"] == "summary")
    steps = [record for record in records if record["kind"] == "rank" and record["phase"] == "train"]
    placement = next(record for record in records if record["kind"] == "config")["placement"][0]
    planned = sum(placement.get("planned", {}).get("to_device", {}).values())
    return result | {
        "file_bytes": sum(steps[-1]["to_device"].values()),
        "planned_file_bytes": placement["forecast"]["to_device"] if "forecast" in placement else planned,
        "edges_by_width": steps[-1]["edges"],
        "epoch_seconds": [epoch["seconds"] for epoch in epochs],
        "losses": [epoch["loss"] for epoch in epochs],
        "val_accuracies": [epoch.get("val_accuracy") for epoch in epochs],
        "test_accuracy": summary["test_accuracy"],
    }


def predicted(command: list[str], memory: str, file: Path, graph: Path) -> dict[str, Any]:
    """Predict, and return what `measured` returns with the accuracy of the classes in `file` on all test vertices."""
    result = measured(command, memory)
    stored, classes = Graph.open(graph, verify=None), torch.from_numpy(np.load(file, mmap_mode="c"))
    assert stored.y is not None
    assert stored.test_mask is not None
    vertices = stored.test_mask.nonzero().view(-1)
    return result | {"test_accuracy": float((classes[vertices] == stored.y[vertices]).double().mean())}


def print_stage(name: str, result: dict[str, Any]) -> None:
    """Print a line of the table."""
    line = (
        f"{name:16} {result['seconds']:8.0f} s  anonymous {result['anonymous_bytes'] / 1e9:6.2f} GB  "
        f"read {result['read_bytes'] / 1e9:7.1f} GB  written {result['written_bytes'] / 1e9:7.1f} GB"
    )
    if "epoch_seconds" in result:
        seconds = statistics.median(result["epoch_seconds"])
        line += f"  epoch {seconds:.2f} s"
        line += f"; it reads {result.get('file_bytes', 0) / 1e9:.2f} GB of files"
    if "least_seconds" in result:
        bound = max(result["least_seconds"], key=result["least_seconds"].__getitem__)
        line += f", {seconds / result['least_seconds'][bound]:.2f} times that of {bound}"
    if "test_accuracy" in result:
        line += f"  test accuracy {result['test_accuracy']:.4f}"
    print(line, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="folder of the graph, of the runs and of their scratch files")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the vertices and edges")
    parser.add_argument("--labelled", default="1.09%", help="share of the vertices to train on")
    parser.add_argument("--feature-dtype", default="float16", help="type of the features in the graph folder")
    parser.add_argument("--memory", default="20GB", help="limit of the memory cgroup, page cache included")
    parser.add_argument("--runs", default="gcn-2-30,sage-2-30", help="model-layers-epochs of each run")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--train", default=TRAINING, help="further options of training")
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
