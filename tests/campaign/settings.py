"""Random runs: graphs, models and tasks, which determine the results, and placements, which must not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

from weft.config.config import Config
from weft.config.optimisations import OPTIMISATIONS
from weft.partition import METHODS
from weft.training.flag_checks import foreign_flags

EXACT = ("single", "tensor", "communicated", "cached", "hybrid", "offload", "pipeline")
STRATEGIES = (*EXACT, "stale")
SMALL = "sbm:vertices=60,degree=4,classes=3,features=5"
PLAIN_GRAPHS = (
    ("digits",),
    ("rmat:300,2k", "--random-features", "8", "--random-classes", "3"),
    (SMALL,),
    (SMALL,),  # twice as often
)
PLAIN_TASKS = (
    ("--model", "gcn", "--norm", "batch"),
    ("--model", "gcn", "--decoupled", "--order", "bfs"),
    ("--model", "sage", "--layers", "3", "--residual", "--order", "degree"),
    (
        "--model",
        "gin",
    ),
    ("--model", "gat", "--heads", "2"),
    ("--model", "gatv2", "--heads", "2", "--norm", "layer"),
    ("--model", "gcn", "--task", "link"),
    ("--model", "sage", "--task", "link", "--decoder", "distmult", "--metrics", "mrr", "--negatives", "2"),
)
TYPED_TASKS = (
    ("--model", "rgcn"),
    ("--model", "rgcn", "--bases", "2", "--inverse-relations"),
    ("--model", "gcn"),
    ("--model", "rgcn", "--task", "link", "--decoder", "distmult"),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A graph and a task: everything that determines the results of a run."""

    graph: tuple[str, ...]
    """Name of the graph, and flags about its data."""
    task: tuple[str, ...]
    """Flags of the model, the task and the seed."""

    def train(self) -> tuple[str, ...]:
        """Return the training command without flags of a placement."""
        return ("train", *self.graph, *self.task)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A strategy with its flags, and a number of ranks."""

    strategy: str
    workers: int
    more: tuple[str, ...]
    """Flags of the strategy."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of the command line for this placement."""
        return ("--strategy", self.strategy, "--workers", str(self.workers), *self.more)


def draw_setting(random: Random, typed: Path) -> Setting:
    """Draw a setting; typed: the store of a typed graph."""
    graph = random.choice((*PLAIN_GRAPHS, (str(typed),)))
    task = random.choice(TYPED_TASKS if graph == (str(typed),) else PLAIN_TASKS)
    fixed = ("--hidden", "8", "--dtype", "float64", "--seed", str(random.randrange(2)))
    return Setting(graph=graph, task=(*task, *fixed))


def draw_placement(random: Random, strategies: tuple[str, ...] = STRATEGIES, max_workers: int = 3) -> Placement:
    """Draw a strategy, a number of ranks, and some flags of the strategy."""
    strategy = random.choice(strategies)
    workers = 1 if strategy == "single" else random.randint(1, max_workers)
    more: list[str] = []
    if strategy not in ("single", "tensor"):
        more += maybe(random, "--partition", tuple(METHODS))
    if strategy in ("tensor", "offload", "pipeline"):
        more += maybe(random, "--chunks", ("2", "3"))
    if strategy == "hybrid":
        more += random.choice(([], ["--measure"], ["--cache-ratio", random.choice(("0", "0.5", "1"))]))
    if strategy in ("offload", "pipeline"):
        more += maybe(random, "--intermediates", ("keep", "recompute"))
    if strategy == "stale":
        more += maybe(random, "--refresh-every", ("1", "3"))
    optional = [name for name in OPTIMISATIONS if not foreign_flags(Config(strategy=strategy, disable=name), strategy)]
    if random.random() < 0.2:
        more += ["--disable", random.choice(optional)]
        if more[-1] == "prefetch":  # which is refused where rows are in memory
            more += ["--device-memory", "1GB"]
    return Placement(strategy=strategy, workers=workers, more=tuple(more))


def maybe(random: Random, flag: str, values: tuple[str, ...]) -> list[str]:
    """Return a flag with a random value, or nothing."""
    return [flag, random.choice(values)] if random.random() < 0.5 else []
