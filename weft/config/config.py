"""Configuration of a run: the one schema of the command line, the TOML file, the checkpoint and `weft.train`."""

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
from weft.config.option import CheckedOptions, option, unknown_option
from weft.config.strategy_flags import BatchFlags, CachingFlags, HostRowFlags, StaleFlags, strategy_option
from weft.utils.errors import InputError

data_option = partial(option, section="data")
task_option = partial(option, section="task")
model_option = partial(option, section="model")
training_option = partial(option, section="training")
run_option = partial(option, section="run")

MEMORY_REMEDY = "use --strategy offload, which stores rows on disk"
"""Advice for a run that exhausts the memory."""
SCHEDULER_EPOCHS = {"step": 30, "cosine": 0, "plateau": 10}
"""Default of `scheduler_epochs` by scheduler; 0: all epochs of the run."""


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """The graph and its preparation."""

    graph: str = data_option("", "name of a built-in graph or a dataset, a generator such as rmat:100k,1m, or a path")
    split: int = data_option(0, "number of the dataset's public split to use", least=0, fixed=True)
    normalize_features: bool = data_option(
        False, "divide the features of each vertex by the sum of their absolute values", fixed=True
    )
    random_features: int = data_option(
        0, "width of random features for a graph without features, by --seed (0: none)", least=0, fixed=True
    )
    random_classes: int = data_option(
        0, "number of random classes for a graph without labels, by --seed (0: none)", least=0, fixed=True
    )
    inverse_relations: bool = data_option(
        False, "add the reverse of every edge, with a new relation for each relation", fixed=True
    )
    order: str = data_option(
        "none",
        "order of the vertices in memory: none (as given), by degree, or breadth first (bfs)",
        choices=("none", "degree", "bfs"),
        fixed=True,
    )


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The task, its loss and its metrics."""

    task: str = task_option(
        "node",
        "what to learn: labels of vertices (node), labels of edges (edge) or missing edges (link)",
        choices=("node", "link", "edge"),
        fixed=True,
    )
    decoder: str = task_option(
        "dot",
        "link: score of a pair of vertices: dot product of their rows (dot), or DistMult with a vector for each "
        "relation (distmult)",
        choices=("dot", "distmult"),
        fixed=True,
    )
    negatives: int = task_option(
        1, "link: number of random negative pairs for each training edge", least=1, most=1000, fixed=True
    )
    eval_negatives: int = task_option(
        0,
        "link: mrr and hits@K compare each held-out edge with this many random targets, the same for all edges of a "
        "source and in all epochs (0: with all vertices)",
        least=0,
        most=10_000,
        fixed=True,
    )
    loss: str = task_option(
        "",
        "node, edge: cross_entropy, bce, mse, l1 or huber; none: depending on the labels, cross_entropy (classes), bce "
        "(several labels) or mse (values); link: bce or bpr (each edge against its negative pairs, which have its "
        "source); none: bce",
        fixed=True,
    )
    class_weights: str = task_option(
        "none",
        "node, edge: weights of the classes in cross_entropy: none, or balanced (each class counts equally)",
        choices=("none", "balanced"),
        fixed=True,
    )
    metrics: str = task_option(
        "",
        "metrics, separated by commas; the first one on validation data selects the best weights. node, edge: "
        "accuracy, micro_f1, macro_f1, roc_auc, average_precision; for values mse, mae, r2; link: auc, mrr and hits@K "
        "(each held-out edge ranked among all vertices), recall@K, ndcg@K and hit_rate@K (the K best targets of each "
        "source, such as recall@20); none: depending on the labels, or auc for link",
        fixed=True,
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model."""

    model: str = model_option(
        "gcn",
        "gcn, sage, gin, gat, gatv2, rgcn or lightgcn, or package.module:Class, which is called as "
        "Class(num_features, num_classes)",
        fixed=True,
    )
    unchecked: bool = model_option(
        False,
        "PyG models: train without comparing the converted model's results with the original's on a small random graph",
        fixed=True,
    )
    decoupled: bool = model_option(
        False,
        "first all linear layers, then all propagation steps, as in SGC and APPNP (a different model)",
        fixed=True,
    )
    layers: int = model_option(2, "number of layers", least=1, most=1000, fixed=True)
    hidden: int = model_option(
        64,
        "width of hidden layers, all heads together; with --task link or edge also of the last layer",
        least=1,
        most=1 << 20,
        fixed=True,
    )
    heads: int = model_option(4, "gat, gatv2: number of attention heads", least=1, most=1 << 20, fixed=True)
    edge_attention: bool = model_option(False, "gat, gatv2: use edge features in the attention", fixed=True)
    attention_dropout: float = model_option(
        0.0, "gat, gatv2: dropout probability of attention weights", least=0, below=1, fixed=True
    )
    bases: int = model_option(
        0,
        "rgcn: number of basis matrices that all relations share (0: a matrix for each relation)",
        least=0,
        fixed=True,
    )
    blocks: int = model_option(
        0,
        "rgcn: number of diagonal blocks of each relation's matrix, in layers whose widths it divides (0: full "
        "matrices)",
        least=0,
        fixed=True,
    )
    one_hot: bool = model_option(
        False,
        "rgcn: in the first layer, a learned row for each vertex and relation (one-hot features) instead of one "
        "for each vertex; for vertices without features",
        fixed=True,
    )
    dropout: float = model_option(
        0.5, "dropout probability before every layer except for the first", least=0, below=1, fixed=True
    )
    input_dropout: float = model_option(0.0, "dropout probability of the input features", least=0, below=1, fixed=True)
    norm: str = model_option(
        "none", "normalization of hidden layers: none, layer or batch", choices=("none", "layer", "batch"), fixed=True
    )
    residual: bool = model_option(False, "add the input of a layer to its output if their widths are equal", fixed=True)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The optimizer and the loop over epochs."""

    epochs: int = training_option(100, "number of epochs", least=1)
    optimizer: str = training_option("adam", "adam, adamw, sgd or rmsprop", fixed=True)
    lr: float = training_option(0.01, "learning rate", least=0, most=1e30, fixed=True)
    weight_decay: float = training_option(
        5e-4, "weight of the L2 penalty; for adamw, decoupled weight decay", least=0, most=1e30, fixed=True
    )
    momentum: float = training_option(0.0, "sgd, rmsprop: momentum", least=0, below=1, fixed=True)
    clip_norm: float = training_option(
        0.0, "scale gradients down if their total norm is larger than this (0: never)", least=0, fixed=True
    )
    scheduler: str = training_option("none", "learning-rate schedule: none, step, cosine or plateau", fixed=True)
    scheduler_epochs: int = training_option(
        0,
        "cosine: length in epochs (0: --epochs); step: epochs between two steps (0: 30); plateau: epochs without "
        "a better validation score (0: 10)",
        least=0,
        fixed=True,
    )
    lr_factor: float = training_option(
        0.1, "step, plateau: factor of the learning rate at each step", least=0, most=1, fixed=True
    )
    warmup_epochs: int = training_option(
        0, "epochs of linear warm-up of the learning rate, before the schedule starts", least=0, fixed=True
    )
    seed: int = training_option(0, "seed of initial weights, dropout and random data", least=0, below=2**63, fixed=True)
    dtype: str = training_option(
        "float32",
        "floating-point type; bfloat16: store activations in 16 bits, while weights and sums stay float32",
        choices=("float32", "float64", "bfloat16"),
        fixed=True,
    )
    eval_every: int = training_option(
        1, "epochs between two evaluations; the last epoch is always evaluated", least=1, fixed=True
    )
    patience: int = training_option(
        0, "early stopping: stop after this many epochs without a better validation score (0: never)", least=0
    )
    until: str = training_option("", "stop when a validation score is reached, such as val_accuracy=0.9; none: never")

    @property
    def goal(self) -> tuple[str, float] | None:
        """Name and value of the validation score at which training stops, or None."""
        match = re.fullmatch(r"([\w@]+)=(-?(?:[0-9]+\.?[0-9]*|\.[0-9]+))", self.until, re.ASCII)
        return (match[1], float(match[2])) if match else None


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """The strategy and the devices, apart from the flags of single strategies (`strategy_flags`)."""

    strategy: str = strategy_option(
        "single",
        "how to distribute rows, columns and edges: single, tensor, communicated, cached, hybrid, stale, "
        "offload, pipeline, split or sampled",
    )
    workers: int = strategy_option(1, "number of local ranks (processes)", least=1, most=4096)
    partition: str = strategy_option(
        "",
        "communicated, cached, hybrid, stale, offload, pipeline, split, sampled: assignment of vertices to "
        "ranks: a method of weft partition, the file of a partition book, or an array of parts (.npy); none: balanced "
        "for pipeline, metis weighted by pre-sampled batches for split, else range",
    )
    machine: str = strategy_option(
        "",
        "hybrid, offload: file of a profile of weft probe, by which they choose what to cache; none: hybrid chooses by "
        "this machine's profile if there is one, else by nominal costs, and offload caches nothing",
    )
    measure: bool = strategy_option(
        False, "hybrid: before the first step, measure on the ranks the kernels and the network that the profile lacks"
    )
    device: str = strategy_option("cpu", "device of every rank: cpu or cuda", choices=("cpu", "cuda"))
    nn_device: str = strategy_option(
        "auto",
        "tensor: where linear layers run: device or host; auto: on the host with --device-memory",
        choices=("auto", "device", "host"),
    )
    disable: str = strategy_option(
        "", f"optimisations to turn off, separated by commas: {', '.join(OPTIMISATIONS)}", several=OPTIMISATIONS
    )
    choices: str = strategy_option(
        "",
        "kernel implementations: choices.json of a run, a profile of weft probe, or default (built-in "
        "selection); none: those of this machine's profile, if there is one",
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Records of a run, and how long it waits."""

    timeline: int = run_option(
        0,
        "number of epochs for which timeline.json shows what each rank does, for https://ui.perfetto.dev (0: none)",
        least=0,
        most=100,
    )
    tensorboard: bool = run_option(False, "also write loss and scores for TensorBoard, to the run's folder")
    timeout: float = run_option(300.0, "seconds without an answer after which a peer counts as lost", least=1)
    checkpoint_every: int = run_option(
        10, "epochs between two checkpoints (0: only at the end, or if stopped)", least=0
    )


@dataclass(frozen=True, kw_only=True)
class LearningOptions(CheckedOptions, TrainingOptions, ModelOptions, TaskOptions, GraphOptions):
    """Options of what is learned: the sections of graph, task, model and training."""


@dataclass(frozen=True, kw_only=True)
class RankOptions(RunOptions, BatchFlags, StaleFlags, HostRowFlags, CachingFlags, PlacementOptions):
    """Options of how ranks work: the strategy with the flags of single strategies, the devices and the records."""


@dataclass(frozen=True, kw_only=True)
class Config(RankOptions, LearningOptions):
    """All options of a run. Instances are frozen; `dataclasses.replace` returns a changed copy.

    The base classes are the sections; code that reads only some of them takes these in place of a Config.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.ratio  # raises InputError if --cache-ratio is between -1 and 0
        if not self.scheduler_epochs and self.scheduler in SCHEDULER_EPOCHS:
            epochs = SCHEDULER_EPOCHS[self.scheduler] or self.epochs
            object.__setattr__(self, "scheduler_epochs", epochs)  # a resumed run with more epochs keeps this value
        if self.until and self.goal is None:
            raise InputError(f"--until {self.until}: give a score and its value, such as val_accuracy=0.9")

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str) -> Config:
        """Return the configuration with the given values.

        Args:
            values: Values by name.
            source: Where the values come from, for errors.

        Raises:
            InputError: A name does not exist. The message suggests the most similar one.
        """
        for name in values:
            if name not in OPTIONS:
                raise InputError(f"{source}: {unknown_option(name, OPTIONS)}")
        return cls(**values)

    @classmethod
    def read(cls, path: Path) -> Config:
        """Return the configuration in a file.

        Raises:
            InputError: The file cannot be read.
        """
        values = read_options(path, cls)
        with named_by(path, cls, values):
            return cls(**values)

    def to_toml(self, leave_out: Collection[str] = ()) -> str:
        """Return the text of a file that `read` accepts.

        Fields in `leave_out` are missing, so they get their defaults.
        """
        values = {name: value for name, value in dataclasses.asdict(self).items() if name not in leave_out}
        return options_text(type(self), values)

    def changed(self, other: Config) -> list[str]:
        """Return the names of the fields that affect a run's results and differ between two configurations."""
        fixed = (spec.name for spec in dataclasses.fields(self) if spec.metadata["fixed"])
        return [name for name in fixed if getattr(self, name) != getattr(other, name)]


OPTIONS = {spec.name: spec for spec in dataclasses.fields(Config)}
"""Fields of Config by name, with help, limits and default."""


def is_imported(model: str) -> bool:
    """Return True if a model is given as package.module:Class, to be imported and called."""
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
"""Fields of Config that decide where results are computed, but do not change them. A prediction may set them anew."""


@dataclass(frozen=True, kw_only=True)
class PartitionOptions(CheckedOptions):
    """Options of the methods of weft.partition; each method uses some of them."""

    seed: int = option(0, "random, metis, balanced, and fennel with --stream random: seed", least=0, below=2**63)
    slack: float = option(0.05, "fennel, balanced: allowed excess of a part over the mean, as a fraction", least=0)
    vertex_weight: int = option(1, "range: number of in-edges that a vertex counts as", least=1)
    stream: str = option(
        "id", "fennel: order in which vertices are assigned: by id or random", choices=("id", "random")
    )
