"""What runs are drawn from: graphs, models and tasks, which decide the numbers, and placements, which must not."""

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
    """A graph and what is learnt of it: all that decides the numbers."""

    graph: tuple[str, ...]
    """Its name, and flags of data."""
    task: tuple[str, ...]
    """The model, the task, the seed."""

    def train(self) -> tuple[str, ...]:
        """The command, without a placement."""
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
        """All of it, for the command line."""
        return ("--strategy", self.strategy, "--workers", str(self.workers), *self.more)


def draw_setting(random: Random, typed: Path) -> Setting:
    """typed: the store of a typed graph."""
    graph = random.choice((*PLAIN_GRAPHS, (str(typed),)))
    task = random.choice(TYPED_TASKS if graph == (str(typed),) else PLAIN_TASKS)
    fixed = ("--hidden", "8", "--dtype", "float64", "--seed", str(random.randrange(2)))
    return Setting(graph=graph, task=(*task, *fixed))


def draw_placement(random: Random, strategies: tuple[str, ...] = STRATEGIES, max_workers: int = 3) -> Placement:
    """One of some strategies, on one rank or several, with some of its flags."""
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
    left_out = [one for one in OPTIMISATIONS if not foreign_flags(Config(strategy=strategy, disable=one), strategy)]
    if random.random() < 0.2:
        more += ["--disable", random.choice(left_out)]
        if more[-1] == "prefetch":  # which is refused where rows are in memory
            more += ["--device-memory", "1GB"]
    return Placement(strategy=strategy, workers=workers, more=tuple(more))


def maybe(random: Random, flag: str, values: tuple[str, ...]) -> list[str]:
    """A flag with one of some values, or nothing."""
    return [flag, random.choice(values)] if random.random() < 0.5 else []
