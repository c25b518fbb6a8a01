"""Commands `weft data import`, `weft data schema` and `weft data info`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.parser import add_options, given_fields, real
from weft.config.config import LearningOptions
from weft.utils.errors import InputError, readable
from weft.utils.log import LOGGER
from weft.utils.terminal import print_line
from weft.utils.user_folders import expand_user

if TYPE_CHECKING:
    from weft.data import Graph
    from weft.data.io.graph_parts import GraphParts

DATA_OPTIONS = (
    "split",
    "normalize_features",
    "random_features",
    "random_classes",
    "inverse_relations",
    "order",
    "seed",
)
"""Options that are flags of `weft data import`."""
FEATURE_DTYPES = ("float32", "float16", "bfloat16", "int8")
"""Names of the types in which features can be stored."""
IN_MEMORY = ("normalize_features", "random_features", "random_classes", "inverse_relations", "order")
"""Options that need the whole graph in memory."""
SECONDS_BETWEEN_LINES = 2.0
"""Shortest time between two lines of progress."""

TABLES, SCHEMA, EDGE_LIST, OGB, GENERATED, WHOLE_GRAPH = (
    "tables",
    "a file that describes tables",
    "an edge list",
    "an OGB folder",
    "a graph generated in parts",
    "a graph with features",
)
"""Kinds of sources from which a graph is imported."""
CITES = "cites:"
"""Beginning of the recipe of a graph that is generated in parts."""
FLAGS = {
    "--vertices": ("FILE: table of vertices (Parquet, Arrow, CSV), one row for each", (TABLES,)),
    "--id": ("column of vertex ids, which the edges use (default: row numbers from 0)", (TABLES,)),
    "--source": ("column of the edges: id of the source vertex (default: source)", (TABLES,)),
    "--target": ("column of the edges: id of the target vertex (default: target)", (TABLES,)),
    "--features": (
        "columns of --vertices, separated by commas, each with a transform if wanted, as in age,balance:rank (docs: "
        "data); for an edge list, a file",
        (TABLES, EDGE_LIST),
    ),
    "--label": ("column of --vertices, or several separated by commas; for an edge list, a file", (TABLES, EDGE_LIST)),
    "--edge-label": ("column of the edges, like --label, for --task edge; --split is then one of edges", (TABLES,)),
    "--label-kind": (
        "meaning of a column of numbers: classes, or values of a regression (default: classes if they are integers)",
        (TABLES,),
    ),
    "--split-time": ("column of --vertices with times: the earliest vertices train, the latest test", (TABLES,)),
    "--weight": ("column of the edges: weight of each edge", (TABLES,)),
    "--edge-features": ("columns of the edges with features, separated by commas", (TABLES,)),
}
"""Flags that describe the source: help text, and the kinds of sources for which they have an effect."""


def add_data_commands(commands: Any) -> None:
    """Add the commands `weft data import`, `weft data schema` and `weft data info` to the subcommands of a parser."""
    command = commands.add_parser("import", help="turn tables, files or a named dataset into a graph folder")
    command.add_argument("graph", nargs="?", metavar="SOURCE", help="a file, a folder or a dataset name")
    command.add_argument(
        "--edges", metavar="FILE", help="table of edges, instead of SOURCE; vertices are identified by the ids in it"
    )
    for flag, (text, _) in FLAGS.items():
        flags = [flag, "--labels"] if flag == "--label" else [flag]
        command.add_argument(*flags, metavar="X", help=text)
    command.add_argument(
        "--undirected", action="store_true", help="add the reverse of every edge, and merge duplicates"
    )
    command.add_argument(
        "--split",
        metavar="X",
        help="percentages for a random split, such as 60,20,20; a column (for an edge list, a file) with train, val "
        "and test; or the number of a public split",
    )
    add_options(command, only=[name for name in DATA_OPTIONS if name != "split"])
    command.add_argument(
        "--feature-dtype",
        choices=FEATURE_DTYPES,
        help="type to store features in: 16 bits halve their files, int8 with a scale for each column quarters them "
        "(default: float32, or 16 bits if they come so)",
    )
    command.add_argument("--out", type=Path, required=True, help="folder of the graph")
    command.add_argument("--overwrite", action="store_true", help="replace an existing graph")
    command.set_defaults(command=import_graph)
    command = commands.add_parser("schema", help="draft a file that says what the columns of some tables mean")
    command.add_argument("tables", nargs="+", metavar="TABLE", help="Parquet, Arrow or CSV file, or a folder of them")
    command.add_argument("--out", type=Path, help="file to write, such as schema.toml (default: print it)")
    command.add_argument("--overwrite", action="store_true", help="replace an existing file")
    command.set_defaults(command=_schema)
    command = commands.add_parser("info", help="show the size and contents of a graph")
    command.add_argument("graph", help="a graph folder, a file or a dataset name")
    command.add_argument("--verify", action="store_true", help="read the whole graph folder and compare checksums")
    command.set_defaults(command=_info)


def import_graph(options: argparse.Namespace) -> int:
    """Write a graph to a folder, part by part unless an option needs the whole graph in memory.

    Returns:
        The exit code.
    """
    import torch

    from weft.data import Graph, as_asked
    from weft.data.io.graph_parts import gather_parts, with_feature_dtype
    from weft.data.store.import_parts import import_parts
    from weft.data.store.store import check_new_store

    check_new_store(options.out, overwrite=options.overwrite)  # before the source is read
    public_split, shares, column = parse_split(options.split)
    config = LearningOptions(
        **given_fields(options) | {"graph": options.graph or options.edges or "", "split": public_split}
    )
    memory_options = {name: getattr(config, name) for name in (*IN_MEMORY, "seed")}
    kind = kind_of_source(options)
    refuse_unused_flags(options, kind, column)
    dtype = None if options.feature_dtype is None else getattr(torch, options.feature_dtype)
    if kind == WHOLE_GRAPH:
        graph = load_whole_graph(config, memory_options, shares)
    else:
        parts = open_parts(options, kind, config, shares, column)
        if config.non_defaults().keys().isdisjoint(IN_MEMORY):
            parts = parts if dtype is None else with_feature_dtype(parts, dtype)
            _describe(import_parts(parts, options.out, throttled_printer(), overwrite=options.overwrite))
            print_line(f"saved in {options.out}")
            return 0
        graph = as_asked(Graph.of(gather_parts(parts)), **memory_options)
    graph = graph if dtype is None else graph.with_feature_dtype(dtype)
    graph.save(options.out, overwrite=options.overwrite)
    _describe(graph)
    print_line(f"saved in {options.out}")
    return 0


def parse_split(text: str | None) -> tuple[int, tuple[float, ...] | None, str | None]:
    """Parse `--split`.

    Returns:
        The number of a public split, the shares of a random split, and the name of a column or file. Two of them are 0
            or None.

    Raises:
        InputError: The shares are not numbers.
    """
    if text is None or (text.isascii() and text.isdecimal() and len(text) < 10):
        return int(text or 0), None, None
    if "," not in text:
        return 0, None, text
    try:
        shares = tuple(real(part) / 100 for part in text.split(","))
    except argparse.ArgumentTypeError:
        shares = ()
    if len(shares) != 3 or abs(sum(shares) - 1) > 1e-6:
        raise InputError(f"--split {text}: give three percentages that add up to 100, such as 60,20,20")
    return 0, shares, None


def kind_of_source(options: argparse.Namespace) -> str:
    """Return the kind of source from which a graph is imported.

    Raises:
        InputError: There is no source, or there are two.
    """
    from weft.data.io.datasets import is_edge_list
    from weft.data.io.ogb import is_ogb

    if options.edges is not None:
        if options.graph is not None:
            raise InputError(f"{options.graph} and --edges {options.edges}: give only one of them")
        return TABLES
    if options.graph is None:
        raise InputError("nothing to import: give a file, a folder or a dataset name, or --edges FILE")
    with readable(options.graph, "check the path"):
        path = expand_user(options.graph)
        if is_ogb(path):
            return OGB
        if options.graph.startswith(CITES):
            return GENERATED
        if path.suffix == ".toml":
            return SCHEMA
        return EDGE_LIST if is_edge_list(path) and path.exists() else WHOLE_GRAPH


def refuse_unused_flags(options: argparse.Namespace, kind: str, column: str | None) -> None:
    """Check that each flag has an effect on the source.

    Args:
        options: The parsed command line.
        kind: Kind of the source.
        column: Name of the column or file of --split, if it is one.

    Raises:
        InputError: A flag has no effect.
    """
    for flag, (_, kinds) in FLAGS.items():
        if getattr(options, flag[2:].replace("-", "_")) is not None and kind not in kinds:
            where = "without --edges FILE" if kinds == (TABLES,) else f"on {options.graph}"
            raise InputError(f"{flag} has no effect {where}: leave it out")
    if options.undirected and kind in (WHOLE_GRAPH, GENERATED):
        raise InputError(f"--undirected has no effect on {options.graph}: leave it out, or import its edge list")
    if column is not None and kind not in (TABLES, EDGE_LIST):
        raise InputError(
            f"--split {column}: {options.graph} has no columns: give a number, or percentages such as 60,20,20"
        )


def load_whole_graph(
    config: LearningOptions, memory_options: dict[str, Any], shares: tuple[float, ...] | None
) -> Graph:
    """Load a graph by a dataset name, a generator, or a file that contains all of it.

    Args:
        config: The graph's name and split.
        memory_options: Options of `weft.load`.
        shares: Shares of a random split, or None.
    """
    from weft.data import load

    graph = load(config.graph, split=config.split, **memory_options)
    return graph if shares is None else graph.with_split(shares, seed=config.seed)


def open_parts(
    options: argparse.Namespace,
    kind: str,
    config: LearningOptions,
    shares: tuple[float, ...] | None,
    column: str | None,
) -> GraphParts:
    """Return a graph in parts, as its source provides it.

    Args:
        options: The parsed command line.
        kind: Kind of the source.
        config: The graph's name, split and seed.
        shares: Shares of a random split, or None.
        column: Name of the column or file of --split, or None.

    Raises:
        InputError: The source has no public splits, or cannot be read.
    """
    from weft.data.io.citations import citation_graph
    from weft.data.io.ogb import ogb_parts
    from weft.data.splits import split_vertices
    from weft.data.tables.edge_list import edge_list_parts
    from weft.data.tables.schema import EdgeColumns, Schema, VertexColumns, read_schema
    from weft.data.tables.table_graph import table_parts
    from weft.data.tables.transforms import describe

    if config.split and kind != OGB:
        raise InputError(f"--split {config.split}: {config.graph} has no public splits: leave it out")
    if kind == OGB:
        parts = ogb_parts(expand_user(config.graph), split=config.split, undirected=options.undirected)
        if shares is None or parts.num_vertices is None:
            return parts
        return replace(parts, masks=split_vertices(parts.y, parts.num_vertices, config.seed, shares))
    if kind == GENERATED:
        parts = citation_graph(config.graph.removeprefix(CITES), config.seed).parts()
        if shares is None or parts.num_vertices is None:
            return parts
        return replace(parts, masks=split_vertices(parts.y, parts.num_vertices, config.seed, shares))
    if kind == EDGE_LIST:
        return edge_list_parts(
            expand_user(config.graph),
            features=options.features,
            labels=options.label,
            split=column,
            shares=shares,
            undirected=options.undirected,
            seed=config.seed,
        )
    if kind == SCHEMA:
        path = expand_user(config.graph)
        parts = table_parts(read_schema(path), name=path.stem, undirected=options.undirected, seed=config.seed)
    else:
        if options.label and options.edge_label:
            raise InputError("--label and --edge-label: a model learns one of them, so leave the other out")
        labels: dict[str, Any] = {
            "label": split_names(options.edge_label or options.label),
            "label_kind": options.label_kind or "",
            "split": column,
            "split_time": options.split_time,
            "shares": shares,
        }
        ends = {"source": options.source or "source", "target": options.target or "target", "weight": options.weight}
        features, edge_features = split_names(options.features), split_names(options.edge_features)
        of_edges = options.edge_label is not None
        schema = Schema.untyped(
            VertexColumns(table=options.vertices, id=options.id, features=features, **{} if of_edges else labels),
            EdgeColumns(table=options.edges, features=edge_features, **ends, **labels if of_edges else {}),
        )
        parts = table_parts(schema, undirected=options.undirected, seed=config.seed)
    for name, transform in parts.schema.transforms() if parts.schema else ():
        print_line(f"{name:17} {describe(transform)}")
    return parts


def split_names(text: str | None) -> tuple[str, ...]:
    """Return names that are separated by commas."""
    return tuple(text.split(",")) if text else ()


def throttled_printer() -> Callable[[str], None]:
    """Return a function that prints a line of progress, unless the previous one is too recent."""
    last_time = time.monotonic()

    def say(text: str) -> None:
        nonlocal last_time
        if time.monotonic() - last_time >= SECONDS_BETWEEN_LINES:
            last_time = time.monotonic()
            LOGGER.info(text)

    return say


def _schema(options: argparse.Namespace) -> int:
    """Run `weft data schema`."""
    from weft.data.tables.draft_schema import draft_schema
    from weft.utils.files.file_writing import write_text

    if options.overwrite and options.out is None:
        raise InputError("--overwrite has no effect without --out: leave it out")
    if options.out is not None and options.out.exists() and not options.overwrite:
        raise InputError(f"--out {options.out} exists already: choose another name or add --overwrite")
    text = draft_schema(options.tables, Path() if options.out is None else options.out.parent)
    if options.out is None:
        for line in text.splitlines():
            print_line(line)
        return 0
    write_text(options.out, text)
    print_line(f"draft in {options.out}: check it, and choose the label")
    return 0


def _info(options: argparse.Namespace) -> int:
    """Run `weft data info`."""
    from weft import data

    graph = data.load(options.graph, verify=options.verify or None)
    if options.verify and graph.path is None:
        raise InputError(f"--verify has no effect on {options.graph}, which is not a graph folder: leave it out")
    _describe(graph)
    if options.verify:
        print_line(f"{'checksums':17} all correct")
    return 0


def _describe(graph: Graph) -> None:
    """Print facts about a graph, one per line."""
    degree, multilabel = graph.in_edges.degree, " (several per vertex)" if graph.multilabel else ""
    max_degree = int(degree.max()) if len(degree) else 0
    dtypes = dict.fromkeys(x.dtype for x in (graph.x, *graph.features.values()) if x is not None and x.itemsize < 4)
    feature_type = "".join(f" in {str(dtype).removeprefix('torch.')}" for dtype in dtypes)
    by_type = ", ".join(f"{x.shape[1]} of {name}" for name, x in graph.features.items())
    facts = {
        "name": graph.name,
        "vertices": f"{graph.num_vertices:,}",
        "edges": f"{graph.num_edges:,}",
        "in-degree": f"mean {graph.num_edges / max(len(degree), 1):.1f}, most {max_degree}",
        "isolated targets": f"{int((degree == 0).sum()):,}",
        "edge weights": "yes" if graph.in_edges.weight is not None else "no",
        "edge features": graph.num_edge_features,
        "relations": len(graph.relations),
        "ids": "row numbers from 0" if graph.vertex_names is None else graph.vertex_names.column,
        "numbering": "original" if graph.ids is None else "reordered",
        "features": f"{by_type or graph.num_features}{feature_type}",
        "values" if graph.label_kind == "values" else "classes": f"{graph.num_classes}{multilabel}",
        "fingerprint": graph.fingerprint,
    }
    for split in ("train", "val", "test"):
        mask = getattr(graph, f"{split}_mask")
        facts[f"{split} vertices"] = "no split" if mask is None else f"{int(mask.sum()):,}"
    if (labels := graph.edge_labels) is not None:
        facts["edge labels"] = f"{labels.num_classes} classes" if labels.label_kind == "classes" else labels.label_kind
        for split in ("train", "val", "test"):
            facts[f"{split} edges"] = f"{int(getattr(labels, f'{split}_mask').sum()):,}"
    for split in ("val", "test") if graph.test_links is not None else ():
        links = getattr(graph, f"{split}_links")
        facts[f"{split} links"] = "none" if links is None else f"{len(links):,}"
    for name, value in facts.items():
        print_line(f"{name:17} {value}")
