"""`predict`: exact inference for every vertex or labelled edge, under any strategy that trains on the whole graph."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Unpack, overload

import torch
from torch import Tensor, nn

from weft.comm import Group
from weft.config.config import PLACEMENT_FIELDS, LearningOptions, RankOptions
from weft.config.optimisations import Optimisations
from weft.config.option import unknown_option
from weft.data import (
    EdgeLabels,
    Graph,
    GraphShape,
    as_asked,
    changed_data,
    embedded_names,
    forward_relations,
    with_inverse_relations,
)
from weft.data.io.graph_parts import gather_parts
from weft.data.tables.schema import EdgeColumns, Schema, VertexColumns, read_schema
from weft.data.tables.table_graph import table_parts
from weft.nn import Converted, Decoder, LinkModel, Stack, Workload
from weft.prediction.link_scores import (
    TopTargets,
    check_link_request,
    read_pairs,
    scored_columns,
    sources_of,
    top_columns,
    top_of_keys,
)
from weft.prediction.result_file import (
    SUFFIXES,
    TABLE_SUFFIXES,
    Kinds,
    ResultFile,
    check_new_file,
    draft_of,
    id_columns,
    parse_what,
    publish_columns,
    selected_rows,
)
from weft.runtime.kernel_selection import KernelSelection
from weft.storage.table_file import HEADERS, TableFile
from weft.strategies import Placed, Plan
from weft.training.arguments import PredictArguments
from weft.training.artifacts.run_folder import NO_DIGESTS, RunFolder
from weft.training.artifacts.saved_model import SavedModel
from weft.training.flag_checks import predicting_config
from weft.training.input_checks import check_placing
from weft.training.launch.joined_ranks import check_consistent, closing_on_error
from weft.training.launch.launcher import launcher_for
from weft.training.launch.processes import require_guard
from weft.training.launch.torchrun import is_main_process, on_first_host, on_present_ranks
from weft.training.launch.watchdog import Watchdog
from weft.training.progress import waiting
from weft.training.rank import plan_with_kernels, prepare_process, use_kernels_of_rank_zero, use_local_gpu
from weft.training.run import Run, data_options, load_graph
from weft.training.tasks.edge_prediction import EdgeAssignment
from weft.training.tasks.link_prediction import LinkTask, owner_of_vertices
from weft.training.tasks.losses import num_logits, output_kind
from weft.training.tasks.row_batching import row_blocks
from weft.training.tasks.task import graph_for_task, make_task
from weft.utils.errors import InputError, RunError, Stopped
from weft.utils.log import LOGGER


@overload
def predict(
    run: Run | str | Path,
    graph: Graph | str | Path | None = None,
    *,
    top: int,
    vertices: Any = None,
    edges: Any = None,
    out: str | Path | None = None,
    what: str = "logits",
    vertex_type: str | None = None,
    ids: Sequence[Any] | str | Path | None = None,
    layer: int | None = None,
    pairs: Any = None,
    model: nn.Module | str | None = None,
    overwrite: bool = False,
    **options: Unpack[PredictArguments],
) -> TopTargets: ...


@overload
def predict(
    run: Run | str | Path,
    graph: Graph | str | Path | None = None,
    *,
    top: None = None,
    vertices: Any = None,
    edges: Any = None,
    out: str | Path | None = None,
    what: str = "logits",
    vertex_type: str | None = None,
    ids: Sequence[Any] | str | Path | None = None,
    layer: int | None = None,
    pairs: Any = None,
    model: nn.Module | str | None = None,
    overwrite: bool = False,
    **options: Unpack[PredictArguments],
) -> Tensor: ...


def predict(
    run: Run | str | Path,
    graph: Graph | str | Path | None = None,
    *,
    vertices: Any = None,
    edges: Any = None,
    out: str | Path | None = None,
    what: str = "logits",
    vertex_type: str | None = None,
    ids: Sequence[Any] | str | Path | None = None,
    layer: int | None = None,
    top: int | None = None,
    pairs: Any = None,
    model: nn.Module | str | None = None,
    overwrite: bool = False,
    **options: Unpack[PredictArguments],
) -> Tensor | TopTargets:
    """Predict for every vertex of a graph, every labelled edge, or links, with the best weights of a run.

    Row v of the result belongs to the vertex with original id v, whose name is `graph.vertex_names[v]` if the graph has
    names. After a task on edges, row e of logits and classes belongs to edge e of `graph.edge_labels`. Under torchrun,
    the ranks of torchrun predict together: each host needs the run's folder and the graph, and the file is on the host
    of rank 0.

    Args:
        run: The run, or its folder.
        graph: A graph, its folder or its name, with the same features and relations as the training graph; it may have
            more vertices and edges. A schema file (.toml) with new tables is read by the transforms of the run.
            Default: the run's own graph, whose held-out links stay held out.
        vertices: New table of vertices instead of `graph`, for a run on tables: a path, a data frame, or arrays by
            name, with the columns of the training table except labels and splits. The run's transforms apply.
        edges: New table of edges.
        out: File to write: .npy, .safetensors, .parquet or .csv. The latter two have columns with the names of the
            vertices, and their types if there are several; for edges, the columns source and target. Default: no file.
        what: "logits" [N, C] in the model's dtype; "probabilities" [N, C]; "classes", int64 [N], or bool [N, C] if a
            vertex may have several; or "embeddings" [N, F], the output of a layer: of a `weft.nn.Stack` before norm and
            activation, of a PyG model the output of a convolution. A .parquet or .csv file can contain several of the
            first three, separated by commas; the logits are returned then.
        vertex_type: Return and write only the vertices of one type, in ascending order. Default: all types.
        ids: Names of the vertices to return and write, in this order, or a file whose first column contains them. With
            `top`, these are the sources. Default: all vertices.
        layer: Number of the layer that gives the embeddings, from 1. Default: the last but one; after a task on edges
            or links the output of the encoder.
        top: With task="link": number of best targets of each source to return, without the targets of its training
            links.
        pairs: With task="link": pairs to score, a table with the columns source, target and, if there are several
            relations, relation: a path, a DataFrame, a pyarrow.Table or arrays by name.
        model: The custom module, constructed as for the run, or where its class is defined ("package.module:Class").
            Default: a copy of the module that `weft.train` received for `run`, or the model of weft that the run's
            configuration names.
        overwrite: Replace an existing file.
        **options: Fields of `weft.Config` that say where to compute (`weft.config.config.PLACEMENT_FIELDS`), such as
            strategy="offload" or device_memory="512MB". Default: as in the run.

    Returns:
        The rows, mapped from `out` or from an unnamed file. Hosts of torchrun other than rank 0's get no rows, [0, C].
        For `top`, a TopTargets with source [q], target [q, k] and score [q, k]; for `pairs`, scores [p].

    Raises:
        InputError: An argument is wrong.
        RunError: A rank failed. No file is written.
        Stopped: SIGTERM or Ctrl-C ended the prediction. No file is written.
    """
    require_guard()
    path = None if out is None else Path(out)
    scores_links = top is not None or pairs is not None
    check_new_file(path, TABLE_SUFFIXES if scores_links else SUFFIXES, overwrite=overwrite)
    names = parse_what(what, path)
    for name in options:
        if name not in PLACEMENT_FIELDS:
            raise unknown_option(name, PLACEMENT_FIELDS, "option of a prediction")
    if model is None and isinstance(run, Run):
        model = copy.deepcopy(run.module)
    saved = SavedModel.read(RunFolder(run.folder if isinstance(run, Run) else Path(run)))
    graph = new_tables(saved, graph, vertices, edges)
    config = on_present_ranks(predicting_config(saved.description.config, options))
    trained = saved.description.config, saved.description.shape
    kind = output_kind(*trained) if config.task != "link" else ""  # a graph for link prediction may have no labels
    if kind == "values" and not {"classes", "probabilities"}.isdisjoint(names):
        raise InputError(f"--what {what}: the run is a regression and has no classes: use --what logits for its values")
    kinds = Kinds(names=names, multi_label=kind == "labels" or (bool(kind) and num_logits(*trained) == 1))
    whole = saved.model(model)
    if scores_links:
        check_link_request(config.task, what, layer, top, has_pairs=pairs is not None)
    else:
        requested_part(whole, what, layer)  # checks `what` and `layer` before the graph is loaded
    launcher = launcher_for(config)
    with waiting("loading the graph", quiet=False):
        loaded = launcher.load(lambda: find_graph(saved, config, graph))
    labels = edges_to_predict(saved, loaded) if config.task == "edge" and what != "embeddings" else None
    selection = selected_rows(loaded, vertex_type, ids, of_vertices=labels is None and pairs is None)
    if selection is not None and top is not None:
        sources_of(loaded, selection)  # checks the sources before ranks start
    if loaded.typed != saved.description.shape.typed:
        whole = saved.model(model, loaded.typed)
    part = whole if scores_links else requested_part(whole, what, layer)
    pair_ids = None if pairs is None else read_pairs(pairs, loaded)
    prepare_process(config)
    # `reach` would skip the rows of vertices that no label depends on.
    work = Workload(part, loaded, Optimisations.without(f"{config.disable},reach"))
    check_placing(config, work, launched=launcher.starts_ranks, own_model=model is not None)
    with closing_on_error(launcher.connect()) as group, draft_of(path) as draft:
        check_consistent(group, f"weft.predict, {what}", vars(config), work)
        of_vertices = labels is None and not scores_links
        plan, choices = plan_with_kernels(config, work, group, saved.folder, predicts=of_vertices)
        rank_work: RowsOfRank = RowsOfRank(
            options=config,
            choices=choices,
            kinds=kinds,
            draft=draft,
            suffix=path.suffix if path and path.suffix in HEADERS else ".npy",
        )
        if scores_links:
            rank_work = LinkScoresOfRank(
                **vars(rank_work), learning=config, top=top or 0, selection=selection, pairs=pair_ids
            )
        ended = launcher.run(plan, rank_work, group)
        if isinstance(ended, int):
            raise Stopped(f"stopped by {signal.Signals(ended).name}; nothing was written", ended)
        table = TableFile.from_record(ended)
        rows = (table if on_first_host() else replace(table, shape=(0, *table.shape[1:]))).open()
        group.all_gather_object({})  # wait until all ranks have opened the table, since rank 0 then renames it
        group.close()
        if not on_first_host():
            return rows
        targets = top_of_keys(rows, loaded, selection) if top is not None else None
        if path and is_main_process():
            if targets is not None:
                publish_columns(top_columns(targets, loaded), path)
            elif pair_ids is not None:
                publish_columns(scored_columns(pair_ids, rows, loaded), path)
            else:
                ids_of_rows = id_columns(loaded, labels)
                file = ResultFile(path=path, kinds=kinds, class_names=loaded.class_names, ids=ids_of_rows)
                file.publish(rows, selection, draft)
    if targets is not None:
        return targets
    return rows if selection is None else rows[selection]


@dataclass(frozen=True, kw_only=True)
class RowsOfRank:
    """Work of a rank in a prediction: evaluate the model, and write the rank's rows to a table that all ranks share."""

    options: RankOptions
    """Options of the prediction."""
    choices: KernelSelection
    """Implementations of kernels that rank 0 uses, and so all ranks."""
    kinds: Kinds
    """Kinds of results, of which ranks write the first."""
    draft: Path
    """Path of the table while it is written."""
    suffix: str
    """File format of the table; see `TableFile`."""

    def __call__(self, plan: Plan, group: Group) -> dict[str, Any]:
        """Run the model and write the rows of a rank. Return the record of the table once all ranks have written.

        Args:
            plan: Plan of the prediction.
            group: The ranks.
        """
        with Watchdog(group.meter, group.rank, self.options.timeout):
            use_local_gpu(self.options)
            use_kernels_of_rank_zero(self.choices, group)
            placed = plan.place(group)
            with group.meter.during("eval", "the prediction"):
                return self._fill(placed, group).record()

    def _fill(self, placed: Placed, group: Group) -> TableFile:
        """Evaluate the placed model and write this rank's rows. Returns the table once all ranks have written."""
        graph, table = placed.graph, None
        labels = graph.edge_labels if isinstance(placed.model, LinkModel) else None
        num_rows = graph.num_vertices if labels is None else len(labels.edges)
        for ids, rows in self._results(placed, labels):  # several only for a single rank
            if table is None:
                record = {} if group.rank else self._create(num_rows, self._values(rows[:0])).record()
                table = TableFile.from_record(group.all_gather_object(record)[0])
            self._put(group, table, ids, rows)
        group.all_gather_object({})
        assert table is not None
        return table

    def _results(self, placed: Placed, labels: EdgeLabels | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield numbers of rows of the table, and these rows of the result, which this rank computes.

        Args:
            placed: The model and graph, placed on this rank.
            labels: The edges of the table; None: its rows are vertices.
        """
        graph, step, model = placed.graph, placed.evaluation(0), placed.model
        if labels is not None:
            assert isinstance(model, LinkModel)
            group, vertices = placed.group, torch.arange(graph.num_vertices)[placed.rows]
            owner = owner_of_vertices(vertices, graph.num_vertices, group)
            assignment = EdgeAssignment(owner=owner, size=group.size, labels=labels)
            edges = assignment.edges(group.rank)
            edge_rows = assignment.rows_of(labels.pairs(edges), vertices, group)
            yield edges, edge_rows.logits(placed.forward(step), model.decoder)
            return
        ids = torch.arange(graph.num_vertices) if graph.ids is None else graph.ids
        ids, num_computed = ids[placed.rows], 0
        for own_rows, rows in placed.logit_ranges(step):
            yield ids[own_rows], rows
            num_computed += len(rows)
        if num_computed != len(ids):
            raise RuntimeError(f"{num_computed:,} of {len(ids):,} rows were computed")

    def _put(self, group: Group, table: TableFile, ids: Tensor, rows: Tensor) -> None:
        """Write rows to the table; all ranks call it together."""
        if on_first_host():
            for block, _ in row_blocks([], rows):
                table.put(ids[block], self._values(rows[block]))
        self._send_to_rank_0(group, table, ids, rows)

    def _send_to_rank_0(self, group: Group, table: TableFile, ids: Tensor, rows: Tensor) -> None:
        """Send the rows of ranks on other hosts to rank 0, which writes them, one block of each rank at a time."""
        blocks = [] if on_first_host() else [block for block, _ in row_blocks([], rows)]
        own_lengths = {"lengths": [len(ids[block]) for block in blocks]}
        lengths = [rank["lengths"] for rank in group.all_gather_object(own_lengths)]
        for number in range(max(map(len, lengths))):
            counts = [sum(rank_lengths[number : number + 1]) for rank_lengths in lengths]
            block = blocks[number] if number < len(blocks) else slice(0)
            row_ids = gather_on_rank_0(group, ids[block], counts)
            values = gather_on_rank_0(group, self._values(rows[block]), counts)
            table.put(row_ids, values)

    def _values(self, rows: Tensor) -> Tensor:
        """Return the values to write for some rows of the model's output."""
        return self.kinds.values(rows.detach().cpu(), self.kinds.stored)

    def _create(self, num_rows: int, values: Tensor) -> TableFile:
        """Create the table file with a number of rows like those of `values`."""
        try:
            shape = (num_rows, *values.shape[1:])
            return TableFile.create(self.draft, self.kinds.stored, shape, values.dtype, self.suffix)
        except OSError as error:
            raise RunError(f"{self.draft}: {error.strerror}: choose a folder with enough space for --out") from error


@dataclass(frozen=True, kw_only=True)
class LinkScoresOfRank(RowsOfRank):
    """Work of a rank in a prediction of links: all ranks compute scores together, and rank 0 writes them to a table.

    The table has the keys of the best targets of each source, int64 [q, k], or the scores of pairs, [p].
    """

    learning: LearningOptions
    """Options of the task."""
    top: int
    """Number of targets of each source, k."""
    selection: Tensor | None
    """Original ids of the sources; None: all vertices that a relation allows."""
    pairs: Tensor | None
    """Pairs to score, by original ids, int64 [p, 3]; None: best targets."""

    def _fill(self, placed: Placed, group: Group) -> TableFile:
        task, z = make_task(self.learning, placed), placed.forward(placed.evaluation(0))
        assert isinstance(task, LinkTask)
        vertex_of_id = task.links.vertex_of_id
        if self.pairs is not None:
            pairs = torch.cat([vertex_of_id[self.pairs[:, :2]], self.pairs[:, 2:]], 1)
            num_rows, parts = len(pairs), iter([task.score(z, pairs)])
        else:
            sources, relations = sources_of(placed.graph, self.selection)
            queries = torch.stack([vertex_of_id[sources], torch.zeros_like(sources), relations], 1)
            num_rows, parts = len(queries), (keys for _, keys in task.top(z, queries, self.top))
        table, first = None, 0
        for part in parts:
            if not group.rank:
                table = table or self._create(num_rows, part[:0].cpu())
                table.put(torch.arange(first, first + len(part)), part.cpu())
            first += len(part)
        return TableFile.from_record(group.all_gather_object(table.record() if table else {})[0])


def gather_on_rank_0(group: Group, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Gather the rows of all ranks on rank 0, in rank order; all ranks call it.

    Args:
        group: The ranks.
        rows: Rows [n, ...] of this rank.
        counts: Number of rows of each rank.

    Returns:
        The rows on rank 0; no rows on the other ranks.
    """
    width = prod(rows.shape[1:])
    received = [0 if group.rank else width * count for count in counts]
    sent = [rows.numel(), *[0] * (group.size - 1)]
    numbers = group.all_to_all(rows.reshape(-1).to(group.device), sent, received, tag="prediction")
    return numbers.cpu().view(sum(received) // max(width, 1), *rows.shape[1:])


def requested_part(model: nn.Module, what: str, layer: int | None) -> nn.Module:
    """Return the part of a model that computes the requested result.

    Args:
        model: The whole model.
        what: Kind of result: a value of `WHAT`.
        layer: Number of the layer that gives the embeddings, from 1. None: the last but one.

    Raises:
        InputError: The model does not have the result.
    """
    if what != "embeddings":
        if layer is not None:
            raise InputError(f"--layer {layer} has no effect on {what}: leave it out, or use --what embeddings")
        if isinstance(model, LinkModel) and isinstance(model.decoder, Decoder):
            raise InputError(
                f"--what {what}: a link prediction model has no classes: use --top, --pairs or --what embeddings"
            )
        return model
    if isinstance(model, LinkModel):
        model = model.encoder
        if layer is None:
            return model
    if not isinstance(model, Converted) and not (isinstance(model, Stack) and model.is_plain):
        raise InputError(
            f"--what embeddings: weft cannot find the layers of a {type(model).__name__}, which is neither a "
            "weft.nn.Stack nor a converted PyG model: use --what logits"
        )
    if not model.num_layers:
        raise InputError(
            "--what embeddings: the model has no convolution over all vertices. Use --what logits with a model that "
            "returns the embeddings"
        )
    number = max(model.num_layers - 1, 1) if layer is None else layer
    if not 1 <= number <= model.num_layers:
        raise InputError(f"--layer {number}: the model has {model.num_layers} layers: give 1 to {model.num_layers}")
    return model.up_to(number)


def find_graph(saved: SavedModel, config: LearningOptions, graph: Graph | str | Path | None) -> Graph:
    """Load the graph to predict on, with the data and in the vertex order of the run's configuration.

    Args:
        saved: The trained model.
        config: Configuration of the prediction.
        graph: The graph, its folder or its name. None: the graph of the run.

    Raises:
        InputError: The graph of the run does not exist or has changed, or a graph has other features or relations.
    """
    path, description = saved.folder.path, saved.description
    if graph is None:
        if description.own_graph:
            raise InputError(
                f"{path} was trained on a graph from a script ({config.graph}), which weft cannot load: name a graph "
                "to predict on"
            )
        loaded = graph_for_task(load_graph(config), config)
        if loaded.fingerprint != description.graph["fingerprint"]:
            raise InputError(
                f"the edges of {config.graph} have changed since {path} was trained. To predict on the new version: "
                f"weft predict {path} {config.graph}"
            )
    else:
        config = replace(config, random_classes=0, split=0)
        if isinstance(graph, Graph):
            loaded = as_asked(graph, **data_options(config))
        else:
            loaded = load_graph(replace(config, graph=str(graph)))
        if config.task == "link" and config.inverse_relations and forward_relations(loaded) == loaded.relations:
            loaded = with_inverse_relations(loaded)
    if description.shape.featured_types:
        loaded = loaded.by_type()
    check_same_widths(description.shape, loaded, description.graph.get("embedded"))
    if graph is None:
        recorded = description.graph.get("data")
        if recorded is None and is_main_process():
            LOGGER.info(NO_DIGESTS.format(path))
        if recorded is not None and (changed := changed_data(loaded, recorded)):
            raise InputError(
                f"{config.graph} has changed since {path} was trained ({', '.join(changed)}). To predict on the new "
                f"version: weft predict {path} {config.graph}"
            )
    return loaded


def new_tables(
    saved: SavedModel, graph: Graph | str | Path | None, vertices: Any, edges: Any
) -> Graph | str | Path | None:
    """Return the graph of new tables, whose columns have the meaning and the transforms of the training tables.

    Args:
        saved: The trained model.
        graph: A graph or its name, which is returned unless it is a schema file.
        vertices: New table of vertices, or None.
        edges: New table of edges, or None.

    Raises:
        InputError: The run has no tables, or not these, or a table is wrong.
    """
    tables = Schema(
        vertices={} if vertices is None else {"": VertexColumns(table=vertices)}, edges={"": EdgeColumns(table=edges)}
    )
    if isinstance(graph, str | Path) and Path(graph).suffix == ".toml":
        tables = read_schema(graph, labels=False)
    elif vertices is None and edges is None:
        return graph
    if graph is not None and (vertices is not None or edges is not None):
        raise InputError("a graph, and --vertices or --edges: give one or the other")
    record = saved.description.graph.get("schema")
    if record is None:
        raise InputError(f"{saved.folder.path} was not trained on tables, so it has no transforms: name a graph")
    schema = Schema.from_record(record, saved.folder.path).with_tables(tables)
    return Graph.of(gather_parts(table_parts(schema)))


def check_same_widths(trained: GraphShape, graph: Graph, trained_names: str | None = None) -> None:
    """Check that a model can read a graph, which may have more vertices and edges than the training graph.

    Args:
        trained: Sizes of the training graph.
        graph: The graph to predict on.
        trained_names: Digest of the names of the vertices without features in the training graph. None: no names.

    Raises:
        InputError: The graph has another number of features or relations, or other vertices without features.
    """
    shape = GraphShape.of(graph)
    widths = {
        "features": (shape.num_features, trained.num_features),
        "edge features": (shape.num_edge_features, trained.num_edge_features),
        "relations": (shape.typed.num_relations, trained.typed.num_relations),
        "features by vertex type": ([width for _, width in sizes.typed.featured] for sizes in (shape, trained)),
        "vertices without features": (shape.typed.num_embedded, trained.typed.num_embedded),
    }
    for name, (actual, expected) in widths.items():
        if actual != expected:
            raise InputError(
                f"{graph.name} has {actual} {name}, and the run's graph had {expected}: the numbers must be equal"
            )
    if trained_names is not None and trained_names != embedded_names(graph):
        raise InputError(
            f"{graph.name} has not the same vertices without features, in the same order, as the run's graph: the "
            "model has a trained row for each, so give the same ones"
        )


def edges_to_predict(saved: SavedModel, graph: Graph) -> EdgeLabels:
    """Return the edges whose labels a model predicts.

    Args:
        saved: The trained model.
        graph: The graph to predict on.

    Raises:
        InputError: The graph lists no edges, or edges with another number of features.
    """
    expected = saved.description.shape.num_label_features
    graph.labels("edge")
    assert graph.edge_labels is not None
    if graph.edge_labels.num_features != expected:
        raise InputError(
            f"{graph.name} has {graph.edge_labels.num_features} features of labelled edges, and the run's graph had "
            f"{expected}: the numbers must be equal"
        )
    return graph.edge_labels
