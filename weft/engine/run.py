"""`train`: from a graph and a model to a finished run, on one rank, on local ranks, or on the ranks of torchrun."""

from __future__ import annotations

import copy
import os
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from weft.comm import Group, join
from weft.core import record
from weft.core.config import Config
from weft.core.errors import InputError, RunError, Stopped
from weft.core.meter import Meter
from weft.data import Graph, load, require_trainable
from weft.engine import checkpoint
from weft.engine.checkpoint import Progress
from weft.engine.folder import RunFolder
from weft.engine.launch import STOPPED, launch
from weft.engine.metrics import NodeTask
from weft.engine.progress import ProgressShow
from weft.engine.stop import StopRequest
from weft.engine.trainer import Trainer
from weft.engine.writer import RunWriter
from weft.nn import from_config
from weft.strategies import GraphShape, get_strategy


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run, as its folder holds it."""

    folder: Path

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return record.read(RunFolder(self.folder).metrics)

    @property
    def summary(self) -> dict[str, Any]:
        """The last line: scores at the best validation score, seconds, and what each rank did."""
        return self.records[-1]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks of a run have in common."""

    config: Config
    folder: Path
    resume: bool
    quiet: bool


def train(
    graph: Graph | str | Path,
    model: nn.Module | str = "gcn",
    *,
    out: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Run:
    """Trains a model on a graph under a strategy; leaves records, checkpoints and the best weights in a folder.

    graph: a Graph, or a name or path that `weft.load` takes. model: gcn, sage, gin, gat, or a module over views of your
    own (see weft.nn.Stack), which has the weights of the best validation score afterwards.
    out: the run's folder; by default a new one in runs/. resume: go on from the newest checkpoint in `out`.
    options: the fields of weft.Config: strategy="tensor", workers=4, epochs=100, ...
    Under torchrun, joins the ranks that are there. In a script, call it under `if __name__ == "__main__":`, since local
    ranks import the script anew.

    Raises InputError for a mistake of the caller; RunError if a rank is lost; Stopped, a KeyboardInterrupt, after
    SIGTERM or Ctrl-C, which the run obeys at the end of the epoch, when its checkpoint is written.
    """
    name = graph.name if isinstance(graph, Graph) else str(graph)
    kind = model if isinstance(model, str) else type(model).__name__
    config = Config.from_dict({**options, "graph": name, "model": kind}, "weft.train")
    whole = graph if isinstance(graph, Graph) else load_graph(config)
    module = None if isinstance(model, str) else model
    return run(config, whole, module, out=Path(out) if out else None, resume=resume, quiet=quiet)


def run(
    config: Config,
    graph: Graph,
    model: nn.Module | None,
    *,
    out: Path | None,
    resume: bool = False,
    quiet: bool = False,
) -> Run:
    """`train` for a graph that is loaded and a configuration; without a model, the one that the configuration names."""
    require_trainable(graph)
    model = from_config(config, graph.num_features, graph.num_classes) if model is None else model
    joined = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    _check(config, graph, model, int(os.environ["WORLD_SIZE"]) if joined else config.workers)
    job = Job(config=config, folder=out or _new_folder(config), resume=resume, quiet=quiet)
    if joined:
        stopped_by = _work_joined(job, graph, model)
    else:
        _open_folder(job, graph)
        stopped_by = _work_alone(job, graph, model) if config.workers == 1 else _work_launched(job, graph, model)
    if stopped_by:
        name = signal.Signals(stopped_by).name
        raise Stopped(f"stopped by {name}; continue with --resume --out {job.folder}", stopped_by)
    if RunFolder(job.folder).model.exists():
        model.load_state_dict(load_file(RunFolder(job.folder).model))
    return Run(folder=job.folder)


def load_graph(config: Config) -> Graph:
    """The graph that a configuration names, with the random data it asks for."""
    return load(
        config.graph,
        random_features=config.random_features,
        random_classes=config.random_classes,
        split=config.split,
        normalize_features=config.normalize_features,
        seed=config.seed,
    )


def _check(config: Config, graph: Graph, model: nn.Module, size: int) -> None:
    """Finds a caller's mistake before ranks start or anything is written."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no GPU here; give --device cpu, or install a CUDA build of torch")
    if graph.x is None:
        raise InputError(f"{graph.name} has features by vertex type: no model of this version takes them")
    get_strategy(config.strategy).trace(model, GraphShape.of(graph), rank=0, size=size, training=True)


def _new_folder(config: Config) -> Path:
    """A folder in runs/ that is not there yet."""
    stem = f"{Path(config.graph).stem.replace(':', '-').replace(',', '-')}-{config.model}-{config.strategy}"
    number = 1
    while (folder := Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return folder


def _open_folder(job: Job, graph: Graph) -> None:
    folder = RunFolder(job.folder)
    if job.resume:
        folder.resume(job.config, graph.fingerprint)
    else:
        folder.start(job.config)


def _work_alone(job: Job, graph: Graph, model: nn.Module) -> int:
    with StopRequest(impatient=True) as stop:
        return _work(job, graph, model, Group(device=job.config.device), stop)


def _work_joined(job: Job, graph: Graph, model: nn.Module) -> int:
    """A rank that torchrun started. Rank 0 opens the folder; its mistake is every rank's."""
    group = join(timeout_seconds=job.config.timeout, meter=Meter(), device=job.config.device)
    mistake = None
    if group.rank == 0:
        try:
            _open_folder(job, graph)
        except InputError as error:
            mistake = str(error)
    mistake = group.share({"mistake": mistake})[0]["mistake"]
    if mistake:
        raise InputError(mistake)
    with StopRequest(impatient=False) as stop:
        stopped_by = _work(job, graph, model, group, stop)
    group.leave()
    return stopped_by


def _work_launched(job: Job, graph: Graph, model: nn.Module) -> int:
    """Starts local ranks, which share the graph through the page cache and get the model's structure and weights."""
    with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
        weights = Path(scratch) / "weights.safetensors"
        save_file({name: value.detach().cpu().contiguous().clone() for name, value in _tensors(model)}, weights)
        store = graph.path
        if store is None:
            store = Path(scratch) / "graph"
            graph.save(store)
        skeleton = copy.deepcopy(model).to("meta")
        try:
            return launch(_local_rank, (job, store, skeleton, weights), workers=job.config.workers)
        except RunError as error:
            raise RunError(f"{error}; continue with --resume --out {job.folder}") from None


def _local_rank(job: Job, store: Path, skeleton: nn.Module, weights: Path, status: Path) -> None:
    """What each process of the launcher runs."""
    meter = Meter()
    meter.show_in(status, int(os.environ["RANK"]))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.config.workers))
    graph = Graph.open(store, verify=False)
    model = skeleton.to_empty(device="cpu")
    values = load_file(weights)
    with torch.no_grad():
        for name, tensor in _tensors(model):
            tensor.copy_(values[name])
    group = join(timeout_seconds=job.config.timeout, meter=meter, device=job.config.device)
    with StopRequest(impatient=False) as stop:
        stopped_by = _work(job, graph, model, group, stop)
    group.leave()
    if stopped_by:
        sys.exit(STOPPED + stopped_by)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and all buffers by name."""
    return [*model.named_parameters(), *model.named_buffers()]


def _work(job: Job, graph: Graph, model: nn.Module, group: Group, stop: StopRequest) -> int:
    """One rank's part of a run; the signal that stopped it, or 0."""
    config, folder = job.config, RunFolder(job.folder)
    model = model.to(group.device)
    strategy = get_strategy(config.strategy)(graph, model, group, seed=config.seed, reuse=config.reuse)
    trainer = Trainer(config, strategy, NodeTask(graph, strategy.rows, group.device))
    found = _found_by_rank_0(folder, group) if job.resume else None
    if found:
        trainer.restore(*found)
    if group.rank:
        return trainer.run(stop, None)
    first = trainer.progress.epoch
    with ProgressShow(first, config.epochs, quiet=job.quiet) as show:
        writer = RunWriter(folder, config, show)
        facts = {"vertices": graph.num_vertices, "edges": graph.num_edges, "fingerprint": graph.fingerprint}
        writer.begin(first, ranks=group.size, threads=torch.get_num_threads(), torch=torch.__version__, graph=facts)
        stopped_by = trainer.run(stop, writer)
    if stopped_by:
        writer.stopped(trainer.progress.epoch - 1, stopped_by)
    else:
        writer.finish(trainer.progress, trainer.best)
    return stopped_by


def _found_by_rank_0(folder: RunFolder, group: Group) -> tuple[Progress, dict[str, Tensor]] | None:
    """The newest checkpoint, read where the folder is and sent to the other ranks."""
    found = checkpoint.newest(folder.checkpoints) if group.rank == 0 else None
    report: dict[str, Any] = {}
    if found:
        shapes = {name: (list(value.shape), str(value.dtype)) for name, value in found.tensors.items()}
        report = {"progress": asdict(found.progress), "shapes": shapes}
    report = group.share(report)[0]
    if not report:
        return None
    tensors = {}
    for name, (shape, dtype) in report["shapes"].items():
        value = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        value = (found.tensors[name] if found else value).to(group.device)
        group.broadcast(value, tag="checkpoint")
        tensors[name] = value
    return Progress(**report["progress"]), tensors
