"""`predict`: what a trained model says of every vertex of a graph, exactly, under any strategy of full graphs."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import Group
from weft.config.config import PLACEMENT_FIELDS, Config
from weft.config.optimisations import Optimisations
from weft.config.option import unknown_option
from weft.data import Graph, GraphShape, VertexNames, as_asked, changed_data, forward_relations, with_inverse_relations
from weft.nn import Converted, LinkModel, Stack, Workload
from weft.runtime.forkserver import temporary_folder
from weft.runtime.kernel_selection import KernelSelection
from weft.storage.table_file import HEADERS, TableFile
from weft.strategies import Plan, get_strategy
from weft.training.artifacts.run_folder import NO_DIGESTS, RunFolder
from weft.training.artifacts.saved_model import SavedModel
from weft.training.flag_checks import refuse_foreign_flags, without_foreign_flags
from weft.training.input_checks import check_placing
from weft.training.launch.joined_ranks import join_ranks, make_on_all_ranks, closing_on_error, plan_with_kernels
from weft.training.launch.local_ranks import on_local_ranks
from weft.training.launch.processes import require_guard
from weft.training.launch.torchrun import is_main_process, on_first_host, on_present_ranks, under_torchrun
from weft.training.launch.watchdog import Watchdog
from weft.training.progress import waiting
from weft.training.rank import prepare_process, use_local_gpu, use_kernels_of_rank_zero
from weft.training.run import Run, data_options, load_graph
from weft.training.tasks.losses import num_logits, output_kind
from weft.training.tasks.row_batching import row_blocks
from weft.training.tasks.task import graph_for_task
from weft.utils.errors import InputError, RunError, Stopped, unknown
from weft.utils.optional_packages import check_extra

WHAT = ("logits", "classes", "embeddings")
SUFFIXES = (*HEADERS, ".parquet")
TRAINING = ("measure", "patience", "until", "timeline")
"""Fields that act on a run that trains alone, whatever its strategy."""


def predict(
    run: Run | str | Path,
    graph: Graph | str | Path | None = None,
    *,
    out: str | Path | None = None,
    what: str = "logits",
    layer: int | None = None,
    model: nn.Module | str | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Tensor:
    """What the best weights of a run give for every vertex of a graph, in the order of the vertices' original ids.

    Row v is of graph.vertex_names[v] where the graph has names; a .parquet file has them as its first column.

    graph: that of the run, or another with the same features and relations, such as one that has grown. A run's
    held-out links are held out of its own graph again, and of no other.
    out: a new .npy, .safetensors or .parquet file; what is returned is mapped, from this file or one without a name.
    what: "logits" [N, C]; "classes", int64 [N], or bool [N, C] where a vertex may have several; "embeddings" [N, F],
    the rows behind a layer of a weft.nn.Stack, before its norm and activation, or what a convolution of a PyG model
    gives. layer: which one, from 1; by default the last but one, and with task="link" the encoder's rows. model: a
    module of one's own, as it was made for the run, or where it is defined, as in "package.module:Class".
    options: fields of weft.Config that say where to compute (weft.config.config.PLACEMENT_FIELDS), such as strategy="offload" and
    device_memory="512MB"; what is not given is as in the run.
    Under torchrun, joins the ranks that are there. The run's folder and the graph are to be on every host; the file is
    on rank 0's, and on the others no rows are returned, [0, C].

    Raises InputError for a mistake of the caller; RunError if a rank is lost; Stopped after SIGTERM or Ctrl-C. Nothing
    is left at `out` then.
    """
    require_guard()
    path = None if out is None else Path(out)
    require_new_file(path, overwrite=overwrite)
    for name in options:
        if name not in PLACEMENT_FIELDS:
            raise unknown_option(name, PLACEMENT_FIELDS, "option of a prediction")
    saved = SavedModel.read(RunFolder(run.folder if isinstance(run, Run) else Path(run)))
    config = on_present_ranks(predicting_config(saved.description.config, options))
    kind = output_kind(saved.description.config, saved.description.shape)
    if what == "classes" and kind == "values":
        raise InputError("--what classes: the run has learnt values: give --what logits, which are these")
    asked = saved.model(model)
    asked_part(asked, what, layer)  # before the graph is loaded
    with waiting("loading the graph", quiet=not is_main_process()):
        found = make_on_all_ranks(config, lambda: find_graph(saved, config, graph))
    asked = asked_part(saved.model(model, found.typed), what, layer)
    prepare_process(config)
    work = Workload(asked, found, Optimisations.without(f"{config.disable},reach"))  # which leaves rows out
    launched = config.workers > 1 and not under_torchrun()
    check_placing(config, work, launched=launched, own_model=model is not None)
    group = join_ranks(f"weft.predict, {what}", config, work)
    with closing_on_error(group), draft_of(path) as draft:
        plan, choices = plan_with_kernels(config, work, group, saved.folder)
        rank_work = RowsOfRank(
            config=config,
            choices=choices,
            what=what,
            several=kind == "labels" or num_logits(saved.description.config, saved.description.shape) == 1,
            draft=draft,
            suffix=path.suffix if path and path.suffix in HEADERS else ".npy",
        )
        rows = launched_rows(rank_work, plan) if launched else rank_work.rows(plan, group)
        if path and is_main_process():
            publish(rows, what, found.vertex_names, draft, path)
    return rows


@dataclass(frozen=True, kw_only=True)
class RowsOfRank:
    """What each rank does: it puts the rows that it answers for into a table which all of them write."""

    config: Config
    choices: KernelSelection
    """Which implementations rank 0 uses, and so all."""
    what: str
    several: bool
    """Whether each logit is of a class by itself, which a vertex may have or not."""
    draft: Path
    suffix: str
    """The format of the table, see TableFile."""

    def rows(self, plan: Plan, group: Group) -> Tensor:
        """The whole table, mapped: of the only rank, or of one of torchrun's, which part then."""
        table = self._write(plan, group)
        rows = (table if on_first_host() else replace(table, shape=(0, *table.shape[1:]))).open()
        group.all_gather_object({})  # until all have it, since rank 0 may take its name
        group.close()
        return rows

    def __call__(self, plan: Plan, group: Group) -> dict[str, Any]:
        """As a rank of the launcher: where the table is."""
        return self._write(plan, group).record()

    def _write(self, plan: Plan, group: Group) -> TableFile:
        """Runs the model, and writes this rank's rows; the table, when all ranks have."""
        with Watchdog(group.meter, group.rank, self.config.timeout):
            use_local_gpu(self.config)
            use_kernels_of_rank_zero(self.choices, group)
            placed, graph = plan.place(group), plan.work.graph
            with group.meter.during("eval", "the prediction"):
                rows = placed.forward(placed.evaluation(0))
                made = {} if group.rank else self._create(graph.num_vertices, self._values(rows[:0])).record()
                table = TableFile.from_record(group.all_gather_object(made)[0])
                ids = torch.arange(graph.num_vertices)[placed.rows] if graph.ids is None else graph.ids[placed.rows]
                if on_first_host():
                    for block, _ in row_blocks([], rows):
                        table.put(ids[block], self._values(rows[block]))
                self._bring(group, table, ids, rows)
                group.all_gather_object({})
        return table

    def _bring(self, group: Group, table: TableFile, ids: Tensor, rows: Tensor) -> None:
        """Has rank 0 write the rows of ranks on other hosts, a block of each at a time."""
        blocks = [] if on_first_host() else [block for block, _ in row_blocks([], rows)]
        everyone = group.all_gather_object({"lengths": [len(ids[block]) for block in blocks]})
        for number in range(max(len(told["lengths"]) for told in everyone)):
            counts = [sum(told["lengths"][number : number + 1]) for told in everyone]
            block = blocks[number] if number < len(blocks) else slice(0)
            brought = to_rank_0(group, ids[block], counts)
            values = to_rank_0(group, self._values(rows[block]), counts)
            table.put(brought, values)

    def _values(self, rows: Tensor) -> Tensor:
        """What is written of rows that the model gives."""
        rows = rows.detach().cpu()
        if self.what != "classes":
            return rows
        return rows > 0 if self.several else rows.argmax(1)

    def _create(self, num_vertices: int, values: Tensor) -> TableFile:
        """A file for as many rows like some values."""
        try:
            shape = (num_vertices, *values.shape[1:])
            return TableFile.create(self.draft, self.what, shape, values.dtype, self.suffix)
        except OSError as error:
            raise RunError(f"{self.draft}: {error.strerror}: give --out a folder with room") from error


def to_rank_0(group: Group, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """All ranks' rows [n, ...], of which each has so many, in rank order on rank 0; none elsewhere."""
    width = prod(rows.shape[1:])
    come = [0 if group.rank else width * count for count in counts]
    sent = [rows.numel(), *[0] * (group.size - 1)]
    found = group.all_to_all(rows.reshape(-1).to(group.device), sent, come, tag="prediction")
    return found.cpu().view(sum(come) // max(width, 1), *rows.shape[1:])


def launched_rows(work: RowsOfRank, plan: Plan) -> Tensor:
    """The whole table, mapped, as local ranks have written it."""
    ended = on_local_ranks(work.config, work, plan)
    if isinstance(ended, int):
        raise Stopped(f"stopped by {signal.Signals(ended).name}; nothing was written", ended)
    return TableFile.from_record(ended).open()


def predicting_config(trained: Config, options: dict[str, Any]) -> Config:
    """The configuration of a prediction: a run's, and what is said otherwise.

    InputError for a flag that has no effect under the strategy.
    """
    asked = get_strategy(options.get("strategy", trained.strategy))
    strategy = asked.evaluates_as or asked.name
    defaults = {name: getattr(Config(), name) for name in TRAINING}
    known = asdict(without_foreign_flags(replace(trained, **defaults), strategy))
    config = Config(**known | options | {"strategy": strategy})
    refuse_foreign_flags(config)
    return config


def asked_part(model: nn.Module, what: str, layer: int | None) -> nn.Module:
    """As much of a model as is asked for. InputError for what it does not have."""
    if what not in WHAT:
        raise unknown("--what", what, WHAT)
    if what != "embeddings":
        if layer is not None:
            raise InputError(f"--layer {layer} has no effect on {what}: leave it out, or give --what embeddings")
        if isinstance(model, LinkModel):
            raise InputError(
                f"--what {what}: a model of links gives vertices rows, not classes: give --what embeddings"
            )
        return model
    if isinstance(model, LinkModel):
        model = model.encoder
        if layer is None:
            return model
    if not isinstance(model, Converted) and not (isinstance(model, Stack) and model.is_plain):
        raise InputError(
            f"--what embeddings: a {type(model).__name__} is no weft.nn.Stack, and not written for PyG, whose layers "
            "could be told apart: give --what logits"
        )
    if not model.num_layers:
        raise InputError(
            "--what embeddings: the model has no convolution over all vertices: give --what logits, of one that "
            "returns the rows"
        )
    number = max(model.num_layers - 1, 1) if layer is None else layer
    if not 1 <= number <= model.num_layers:
        raise InputError(f"--layer {number}: the model has {model.num_layers} layers: give 1 to {model.num_layers}")
    return model.up_to(number)


def find_graph(saved: SavedModel, config: Config, graph: Graph | str | Path | None) -> Graph:
    """The graph of a run, or the one given, with the data and in the order that the run's configuration asks for.

    InputError where the run's is not there or another one now, and for one with other features or relations.
    """
    path, described = saved.folder.path, saved.description
    if graph is None:
        if described.own_graph:
            raise InputError(
                f"{path} was trained on a graph that a script made ({config.graph}): name one to predict on"
            )
        found = graph_for_task(load_graph(config), config)
        if found.fingerprint != described.graph["fingerprint"]:
            raise InputError(
                f"{config.graph} is not the graph any more that {path} was trained on: name it, as in weft predict RUN "
                "GRAPH, if it is to be predicted on as it is now"
            )
    else:
        config = replace(config, random_classes=0, split=0)
        if isinstance(graph, Graph):
            found = as_asked(graph, **data_options(config))
        else:
            found = load_graph(replace(config, graph=str(graph)))
        if config.task == "link" and config.inverse_relations and forward_relations(found) == found.relations:
            found = with_inverse_relations(found)
    if described.shape.featured_types:
        found = found.by_type()
    require_alike(described.shape, found)
    if graph is None:
        recorded = described.graph.get("data")
        if recorded is None and is_main_process():
            print(NO_DIGESTS.format(path), file=sys.stderr)
        if recorded is not None and (changed := changed_data(found, recorded)):
            raise InputError(
                f"{config.graph} has changed since {path} was trained ({', '.join(changed)}): to predict on it as it "
                f"is now, name it: weft predict {path} {config.graph}"
            )
    return found


def require_alike(trained: GraphShape, graph: Graph) -> None:
    """InputError for a graph that a model for another one cannot read: it may have more vertices and edges alone."""
    shape = GraphShape.of(graph)
    widths = {
        "features": (shape.num_features, trained.num_features),
        "edge features": (shape.num_edge_features, trained.num_edge_features),
        "relations": (shape.typed.num_relations, trained.typed.num_relations),
        "features by vertex type": ([width for _, width in one.typed.featured] for one in (shape, trained)),
        "vertices without features": (shape.typed.num_embedded, trained.typed.num_embedded),
    }
    for name, (has, had) in widths.items():
        if has != had:
            raise InputError(f"{graph.name} has {has} {name}, and the run's graph had {had}: give one that has as many")


def require_new_file(path: Path | None, *, overwrite: bool) -> None:
    """InputError for a place where no file can be made, or where there is one, and for a format that there is not."""
    if path is None or not on_first_host():
        return
    if path.suffix not in SUFFIXES:
        raise unknown("format of --out", path.suffix, SUFFIXES)
    if path.suffix == ".parquet":
        check_extra("pyarrow", f"--out {path}")
    if not path.parent.is_dir():
        raise InputError(f"--out {path}: there is no folder {path.parent}: make it, or give another")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"--out {path}: {path.parent} cannot be written: give another folder")
    if path.is_dir() or (path.exists() and not overwrite):
        raise InputError(
            f"--out {path} is there already: give another name{'' if path.is_dir() else ' or --overwrite'}"
        )


@contextmanager
def draft_of(path: Path | None) -> Iterator[Path]:
    """Where a file is written before it has its name; what is left there in the end is removed."""
    if path is None:
        with tempfile.TemporaryDirectory(prefix="weft-", dir=temporary_folder()) as folder:
            yield Path(folder) / "table"
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def publish(rows: Tensor, what: str, names: VertexNames | None, draft: Path, path: Path) -> None:
    """Gives a draft its name; before that, writes the rows anew where the file is to be of a format of its own."""
    try:
        if path.suffix not in HEADERS:
            draft.unlink()  # they are mapped
            write_parquet(rows, what, names, draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}: give a folder with room") from error


def write_parquet(rows: Tensor, what: str, names: VertexNames | None, path: Path) -> None:
    """Writes rows [N, C], or [N], as a Parquet file: a column for each, and a group of rows for each block.

    names: of the vertices, the first column.
    """
    import pyarrow
    import pyarrow.parquet

    singular = {"logits": "logit", "classes": "class", "embeddings": "embedding"}[what]
    table = rows.unsqueeze(1) if rows.dim() == 1 else rows
    of_rows = [singular] if rows.dim() == 1 else [f"{singular}_{number}" for number in range(table.shape[1])]
    fields = [(name, pyarrow.from_numpy_dtype(table.numpy().dtype)) for name in of_rows]
    if names is not None:
        column = f"{names.column}_of_vertex" if names.column in of_rows else names.column
        fields.insert(0, (column, pyarrow.int64() if names.numbers is not None else pyarrow.string()))
    schema = pyarrow.schema(fields)
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for block, _ in row_blocks([], table):
            columns = [pyarrow.array(column.numpy()) for column in table[block].t().contiguous()]
            if names is not None:
                columns.insert(0, pyarrow.array(names.slice(block)))
            writer.write_table(pyarrow.table(columns, schema=schema))
