"""The one schema of a run: the command line, the TOML file, the checkpoint and `weft.train` all read these fields."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weft.config.files import named_by, options_text, read_options
from weft.config.optimisations import OPTIMISATIONS
from weft.config.option import checked, option, unknown_option
from weft.utils.errors import InputError

data_option = partial(option, section="data")
task_option = partial(option, section="task")
model_option = partial(option, section="model")
training_option = partial(option, section="training")
strategy_option = partial(option, section="strategy")
run_option = partial(option, section="run")

SCHEDULER_EPOCHS = {"step": 30, "cosine": 0, "plateau": 10}
"""What `scheduler_epochs` is where it is not given; 0: all epochs of the run."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides a run. Frozen: a changed one is a new one (`dataclasses.replace`)."""

    graph: str = data_option("", "a built-in or dataset name, a generator such as rmat:100k,1m, or a path")
    split: int = data_option(0, "which of a dataset's public splits to use", least=0, fixed=True)
    normalize_features: bool = data_option(
        False, "divide a vertex's features by the sum of their absolute values", fixed=True
    )
    random_features: int = data_option(
        0, "width of seeded random features for a graph without any", least=0, fixed=True
    )
    random_classes: int = data_option(
        0, "number of seeded random classes for a graph without labels", least=0, fixed=True
    )
    inverse_relations: bool = data_option(
        False, "add an edge against every one, of a relation of its own for each relation", fixed=True
    )
    order: str = data_option(
        "none",
        "numbering of the vertices in memory: none, by degree, or breadth first (bfs)",
        choices=("none", "degree", "bfs"),
        fixed=True,
    )

    task: str = task_option(
        "node",
        "what to learn: classes of vertices (node) or missing edges (link)",
        choices=("node", "link"),
        fixed=True,
    )
    decoder: str = task_option(
        "dot",
        "link: the score of two rows, their dot product or that of DistMult, which knows relations",
        choices=("dot", "distmult"),
        fixed=True,
    )
    negatives: int = task_option(
        1, "link: pairs drawn by chance for each edge in training", least=1, most=1000, fixed=True
    )
    loss: str = task_option(
        "",
        "node: cross_entropy, bce, mse, l1 or huber; none: by the labels, cross_entropy (classes), bce (several) or "
        "mse (values)",
        fixed=True,
    )
    class_weights: str = task_option(
        "none",
        "node: weights of the classes in cross_entropy; balanced: all classes count as much",
        choices=("none", "balanced"),
        fixed=True,
    )
    metrics: str = task_option(
        "",
        "scores, separated by commas; that of validation by the first chooses the best weights. node: accuracy, "
        "micro_f1, macro_f1, roc_auc, average_precision; mse, mae, r2 of values; link: auc, mrr (each held-out edge "
        "among all vertices); none: by the labels, or auc",
        fixed=True,
    )

    model: str = model_option(
        "gcn",
        "gcn, sage, gin, gat, gatv2 or rgcn, or package.module:Class, called as Class(num_features, num_classes)",
        fixed=True,
    )
    decoupled: bool = model_option(False, "all updates first, then all propagations (a different model)", fixed=True)
    layers: int = model_option(2, "number of layers", least=1, most=1000, fixed=True)
    hidden: int = model_option(
        64,
        "width of the hidden layers (all heads together), and for link of the last",
        least=1,
        most=1 << 20,
        fixed=True,
    )
    heads: int = model_option(4, "attention heads of gat and gatv2", least=1, most=1 << 20, fixed=True)
    edge_attention: bool = model_option(False, "gat and gatv2: attend by the graph's edge features too", fixed=True)
    attention_dropout: float = model_option(
        0.0, "gat and gatv2: dropout of the weights that edges have", least=0, below=1, fixed=True
    )
    bases: int = model_option(
        0, "matrices that the relations of rgcn mix theirs of (basis decomposition); 0: one each", least=0, fixed=True
    )
    blocks: int = model_option(
        0, "diagonal blocks of the matrices of rgcn, where both widths divide; 0: whole ones", least=0, fixed=True
    )
    one_hot: bool = model_option(
        False, "vertices without features have a row for each relation in rgcn's first layer, not one", fixed=True
    )
    dropout: float = model_option(0.5, "dropout before every layer but the first", least=0, below=1, fixed=True)
    input_dropout: float = model_option(0.0, "dropout on the features", least=0, below=1, fixed=True)
    norm: str = model_option("none", "normalisation of hidden rows", choices=("none", "layer", "batch"), fixed=True)
    residual: bool = model_option(False, "add a layer's input to its output where the widths agree", fixed=True)

    epochs: int = training_option(100, "number of epochs", least=1)
    optimizer: str = training_option("adam", "adam, adamw, sgd or rmsprop", fixed=True)
    lr: float = training_option(0.01, "learning rate", least=0, most=1e30, fixed=True)
    weight_decay: float = training_option(
        5e-4, "L2 penalty; of adamw, what it takes from the weights themselves", least=0, most=1e30, fixed=True
    )
    momentum: float = training_option(
        0.0, "sgd and rmsprop: share of the last step in the next", least=0, below=1, fixed=True
    )
    clip_norm: float = training_option(
        0.0, "scale gradients down where the norm of all of them is more; 0: never", least=0, fixed=True
    )
    scheduler: str = training_option("none", "learning rate by epoch: none, step, cosine or plateau", fixed=True)
    scheduler_epochs: int = training_option(
        0,
        "epochs of cosine (0: --epochs), between two steps (0: 30), or without a better validation score at a plateau "
        "(0: 10)",
        least=0,
        fixed=True,
    )
    lr_factor: float = training_option(
        0.1, "step and plateau: what the learning rate is multiplied by", least=0, most=1, fixed=True
    )
    warmup_epochs: int = training_option(
        0, "epochs in which the learning rate rises evenly, before a schedule begins", least=0, fixed=True
    )
    seed: int = training_option(0, "seed of weights, dropout and random data", least=0, below=2**63, fixed=True)
    dtype: str = training_option(
        "float32",
        "floating-point type; bfloat16: of rows alone, which are summed, and meet parameters, in float32",
        choices=("float32", "float64", "bfloat16"),
        fixed=True,
    )
    eval_every: int = training_option(
        1, "epochs between evaluations; the last epoch is always evaluated", least=1, fixed=True
    )
    patience: int = training_option(
        0, "stop after this many epochs without a better validation score; 0: never", least=0
    )
    until: str = training_option(
        "", "stop as soon as the validation score is reached, such as val_accuracy=0.9; none: never"
    )

    strategy: str = strategy_option(
        "single",
        "where rows, columns and edges live: single, tensor, communicated, cached, hybrid, stale, offload, "
        "pipeline, split or sampled",
    )
    workers: int = strategy_option(1, "number of local ranks", least=1, most=4096)
    partition: str = strategy_option(
        "",
        "communicated, cached, hybrid, stale, offload, pipeline, split, sampled: which rank has which vertex: a method "
        "of weft partition, or a book's file; none: balanced for pipeline, metis by what batches draw for split, else "
        "range",
    )
    batch_size: str = strategy_option(
        "", "split, sampled: training vertices, or links, of a mini-batch on all ranks, or all; none: 1024", fixed=True
    )
    fanout: str = strategy_option(
        "10",
        "split, sampled: in-edges drawn for a vertex, a number for all layers or one for each from the batch "
        "outward, or all",
        fixed=True,
    )
    sampling: str = strategy_option(
        "uniform",
        "split, sampled: how in-edges are drawn: uniform, labor (few vertices) or weighted (by edge weights)",
        choices=("uniform", "labor", "weighted"),
        fixed=True,
    )
    batch_dependency: int = strategy_option(
        1,
        "split, sampled: batches over which the draws of labor change; 1: each batch draws anew",
        least=1,
        most=1 << 20,
        fixed=True,
    )
    prefetch_batches: int = strategy_option(
        2, "split, sampled: mini-batches that a thread makes ahead of their step; 0: none", least=0, most=1000
    )
    cache_ratio: float = strategy_option(
        -1.0,
        "hybrid, offload: share of remote sources to cache at each layer; -1: where it costs less (offload: none)",
        least=-1,
        most=1,
    )
    cache_memory: str = strategy_option(
        "",
        "hybrid, offload, split, sampled: what a rank's cache may take, such as 512MB: vertices that it recomputes "
        "(none: no limit); of split and sampled, features that batches read (none: no cache)",
    )
    machine: str = strategy_option(
        "",
        "hybrid, offload: file of a profile of weft probe, by which they choose what to cache; none: hybrid chooses by "
        "this machine's profile if there is one, else by nominal costs, and offload caches nothing",
    )
    measure: bool = strategy_option(
        False, "hybrid: before the first step, measure on the ranks the kernels and the network that the profile lacks"
    )
    refresh_every: int = strategy_option(4, "stale: training steps between two exchanges of halos", least=1)
    staleness: float = strategy_option(
        0.0, "stale: exchange as soon as rows have changed by more than this share; 0: not before", least=0
    )
    device: str = strategy_option("cpu", "device of every rank", choices=("cpu", "cuda"))
    device_memory: str = strategy_option(
        "", "tensor, offload, pipeline: what a rank has on its device at once, such as 512MB; none: no limit"
    )
    nn_device: str = strategy_option(
        "auto",
        "tensor: where rows are mapped, on the device or on the host; auto: on the host under --device-memory",
        choices=("auto", "device", "host"),
    )
    chunks: int = strategy_option(
        0,
        "tensor, offload, pipeline: parts that aggregates are made in, one by one; 0: as --device-memory needs, "
        "under pipeline 1 or 4 to 8, by what there is to do",
        least=0,
        most=1 << 14,
    )
    intermediates: str = strategy_option(
        "auto",
        "offload, pipeline: what the backward pass has of an aggregate: kept on the host, or recomputed; auto: what "
        "costs less",
        choices=("auto", "keep", "recompute"),
    )
    scratch: str = strategy_option(
        "",
        "offload, pipeline: folder for rows on the host; none: memory, or under --device-memory that for temporary "
        "files",
    )
    disable: str = strategy_option(
        "", f"optimisations to leave out, separated by commas: {', '.join(OPTIMISATIONS)}", several=OPTIMISATIONS
    )
    choices: str = strategy_option(
        "",
        "which implementations of kernels to use: a run's choices.json, a profile of weft probe, or default; none: as "
        "this machine's profile says, where there is one",
    )
    timeline: int = run_option(
        0,
        "epochs of which timeline.json shows what each rank does when, for https://ui.perfetto.dev; 0: none",
        least=0,
        most=100,
    )
    timeout: float = run_option(300.0, "seconds after which a silent peer counts as lost", least=1)
    checkpoint_every: int = run_option(10, "epochs between checkpoints; 0: only when stopped and at the end", least=0)

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            object.__setattr__(self, spec.name, checked(spec, getattr(self, spec.name)))
        if not self.scheduler_epochs and self.scheduler in SCHEDULER_EPOCHS:
            epochs = SCHEDULER_EPOCHS[self.scheduler] or self.epochs
            object.__setattr__(self, "scheduler_epochs", epochs)  # so that a longer run keeps to it
        if self.until and self.goal is None:
            raise InputError(f"--until {self.until}: give a score and its value, such as val_accuracy=0.9")

    @property
    def goal(self) -> tuple[str, float] | None:
        """The score that a run trains until it is reached, by name, and its value; None: there is none."""
        found = re.fullmatch(r"(\w+)=(-?(?:[0-9]+\.?[0-9]*|\.[0-9]+))", self.until, re.ASCII)
        return (found[1], float(found[2])) if found else None

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str) -> Config:
        """A Config from a mapping; InputError names `source` and a field that does not exist, with the nearest."""
        known = [spec.name for spec in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise InputError(f"{source}: {unknown_option(name, known)}")
        return cls(**values)

    @classmethod
    def read(cls, path: Path) -> Config:
        """The Config saved at `path`; InputError if it cannot be read."""
        values = read_options(path, cls)
        with named_by(path, cls, values):
            return cls(**values)

    def to_toml(self, leave_out: Collection[str] = ()) -> str:
        """The text that `read` takes, without some fields, which have their defaults then."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if name not in leave_out}
        return options_text(type(self), values)

    def changed(self, other: Config) -> list[str]:
        """Names of the fields that decide the numbers and differ between the two."""
        fixed = (spec.name for spec in dataclasses.fields(self) if spec.metadata["fixed"])
        return [name for name in fixed if getattr(self, name) != getattr(other, name)]


def is_imported(model: str) -> bool:
    """Return whether a model's name says where its code is, as package.module:Class, which is imported and called."""
    return ":" in model


PLACEMENT_FIELDS = (
    "strategy",
    "workers",
    "partition",
    "cache_ratio",
    "cache_memory",
    "machine",
    "device",
    "device_memory",
    "nn_device",
    "chunks",
    "scratch",
    "disable",
    "choices",
    "timeout",
)
"""Fields of Config that change no number, but where it is made: a prediction may have others than its run."""


@dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """What the methods of weft.partition can be told; each reads what concerns it."""

    seed: int = option(0, "seed of random, metis, balanced and a random stream", least=0, below=2**63)
    slack: float = option(0.05, "how far parts of fennel (vertices) and balanced may be from the mean", least=0)
    vertex_weight: int = option(1, "in-edges that a vertex counts for in range", least=1)
    stream: str = option("id", "order in which fennel takes the vertices: id or random", choices=("id", "random"))

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            checked(spec, getattr(self, spec.name))
