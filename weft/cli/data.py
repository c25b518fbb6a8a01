"""`weft data`: graphs brought to disk, and what they hold."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.parser import add_options, given_fields, real
from weft.config.config import Config
from weft.utils.errors import InputError, readable

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
IN_MEMORY = ("normalize_features", "random_features", "random_classes", "inverse_relations", "order")
"""Options for which a graph has to be in memory."""
SECONDS_BETWEEN_LINES = 2.0

TABLES, EDGE_LIST, OGB, KNOWN = "tables", "an edge list", "a folder of OGB's", "a graph with features of its own"
"""What a graph is imported from."""
FLAGS = {
    "--vertices": ("FILE: a table of vertices (Parquet, Arrow, CSV), a row for each", (TABLES,)),
    "--id": ("column of the vertices' ids, by which the edges name them (none: rows, from 0 on)", (TABLES,)),
    "--source": ("column of the edges: the id that each leaves (source)", (TABLES,)),
    "--target": ("column of the edges: the id that each enters (target)", (TABLES,)),
    "--features": ("columns of --vertices, separated by commas; beside an edge list a file", (TABLES, EDGE_LIST)),
    "--label": ("column of --vertices, or several; beside an edge list a file", (TABLES, EDGE_LIST)),
    "--split-time": ("column of --vertices: the earliest train, the latest test", (TABLES,)),
    "--weight": ("column of the edges", (TABLES,)),
    "--edge-features": ("columns of the edges, separated by commas", (TABLES,)),
}


def add_data_commands(commands: Any) -> None:
    """The flags of `weft data import` and `weft data info`."""
    command = commands.add_parser("import", help="turn tables, files or a named dataset into a graph folder")
    command.add_argument("graph", nargs="?", metavar="SOURCE", help="a file, a folder or a dataset name")
    command.add_argument("--edges", metavar="FILE", help="a table of edges in place of SOURCE; its ids are names")
    for flag, (text, _) in FLAGS.items():
        flags = [flag, "--labels"] if flag == "--label" else [flag]
        command.add_argument(*flags, metavar="X", help=text)
    command.add_argument("--undirected", action="store_true", help="let every edge lead both ways, once")
    command.add_argument(
        "--split",
        metavar="X",
        help="shares to draw such as 60,20,20; a column (a file beside an edge list) of train, val and test; or the "
        "number of one of several public splits",
    )
    add_options(command, only=[name for name in DATA_OPTIONS if name != "split"])
    command.add_argument("--out", type=Path, required=True, help="folder of the graph")
    command.add_argument("--overwrite", action="store_true", help="replace the graph that is there")
    command.set_defaults(command=import_graph)
    command = commands.add_parser("info", help="what a graph holds")
    command.add_argument("graph", help="a graph folder, a file or a dataset name")
    command.add_argument("--verify", action="store_true", help="read all of a graph folder, and compare checksums")
    command.set_defaults(command=_info)


def import_graph(options: argparse.Namespace) -> int:
    """Writes a graph as a folder: of parts as they come, unless an option needs the whole of it."""
    from weft.data import Graph, as_asked
    from weft.data.io.graph_parts import gather_parts
    from weft.data.store.import_parts import import_parts

    public, shares, column = parse_split(options.split)
    config = Config(**given_fields(options, Config) | {"graph": options.graph or options.edges or "", "split": public})
    asked = {name: getattr(config, name) for name in (*IN_MEMORY, "seed")}
    kind = kind_of_source(options)
    refuse_unused_flags(options, kind, column)
    if kind == KNOWN:
        graph = load_whole_graph(config, asked, shares)
    else:
        parts = open_parts(options, kind, config, shares, column)
        if not any(getattr(config, name) != getattr(Config(), name) for name in IN_MEMORY):
            _describe(import_parts(parts, options.out, throttled_printer(), overwrite=options.overwrite))
            print(f"saved in {options.out}")
            return 0
        graph = as_asked(Graph.of(gather_parts(parts)), **asked)
    graph.save(options.out, overwrite=options.overwrite)
    _describe(graph)
    print(f"saved in {options.out}")
    return 0


def parse_split(text: str | None) -> tuple[int, tuple[float, ...] | None, str | None]:
    """What --split says: a public split's number, shares, or the name of a column or file. InputError for no shares."""
    if text is None or (text.isascii() and text.isdecimal() and len(text) < 10):
        return int(text or 0), None, None
    if "," not in text:
        return 0, None, text
    try:
        shares = tuple(real(part) / 100 for part in text.split(","))
    except argparse.ArgumentTypeError:
        raise InputError(f"--split {text}: give three shares in per cent, such as 60,20,20") from None
    return 0, shares, None


def kind_of_source(options: argparse.Namespace) -> str:
    """What a graph is imported from."""
    from weft.data.io.datasets import is_edge_list
    from weft.data.io.ogb import is_ogb

    if options.edges is not None:
        if options.graph is not None:
            raise InputError(f"{options.graph} and --edges {options.edges}: give one of them")
        return TABLES
    if options.graph is None:
        raise InputError("nothing to import: give a file, a folder or a dataset name, or --edges FILE")
    with readable(options.graph, "check the path"):
        path = Path(options.graph).expanduser()
        if is_ogb(path):
            return OGB
        return EDGE_LIST if is_edge_list(path) and path.exists() else KNOWN


def refuse_unused_flags(options: argparse.Namespace, kind: str, column: str | None) -> None:
    """InputError for a flag that has no effect on what is imported."""
    for flag, (_, kinds) in FLAGS.items():
        if getattr(options, flag[2:].replace("-", "_")) is not None and kind not in kinds:
            where = "without --edges FILE" if kinds == (TABLES,) else f"on {options.graph}"
            raise InputError(f"{flag} has no effect {where}: leave it out")
    if options.undirected and kind == KNOWN:
        raise InputError(f"--undirected has no effect on {options.graph}: leave it out, or import its edge list")
    if column is not None and kind not in (TABLES, EDGE_LIST):
        raise InputError(f"--split {column}: {options.graph} has no columns: give a number, or shares such as 60,20,20")


def load_whole_graph(config: Config, asked: dict[str, Any], shares: tuple[float, ...] | None) -> Graph:
    """The graph of a name, a recipe or a file that holds all of it."""
    from weft.data import load

    graph = load(config.graph, split=config.split, **asked)
    return graph if shares is None else graph.with_split(shares, seed=config.seed)


def open_parts(
    options: argparse.Namespace, kind: str, config: Config, shares: tuple[float, ...] | None, column: str | None
) -> GraphParts:
    """The graph in the parts in which its source gives it."""
    from weft.data.io.ogb import ogb_parts
    from weft.data.splits import split_vertices
    from weft.data.tables.edge_list import edge_list_parts
    from weft.data.tables.table_graph import ColumnRoles, table_parts

    if config.split and kind != OGB:
        raise InputError(f"--split {config.split}: {config.graph} has no splits to choose from: leave it out")
    if kind == OGB:
        parts = ogb_parts(Path(config.graph).expanduser(), split=config.split, undirected=options.undirected)
        if shares is None or parts.num_vertices is None:
            return parts
        return replace(parts, masks=split_vertices(parts.y, parts.num_vertices, config.seed, shares))
    if kind == EDGE_LIST:
        return edge_list_parts(
            Path(config.graph).expanduser(),
            features=options.features,
            labels=options.label,
            split=column,
            shares=shares,
            undirected=options.undirected,
            seed=config.seed,
        )
    columns = ColumnRoles(
        id=options.id,
        source=options.source or "source",
        target=options.target or "target",
        features=split_names(options.features),
        label=split_names(options.label),
        split=column,
        split_time=options.split_time,
        weight=options.weight,
        edge_features=split_names(options.edge_features),
    )
    return table_parts(
        options.vertices, options.edges, columns, undirected=options.undirected, shares=shares, seed=config.seed
    )


def split_names(text: str | None) -> tuple[str, ...]:
    """Names that are separated by commas."""
    return tuple(text.split(",")) if text else ()


def throttled_printer() -> Callable[[str], None]:
    """What prints a line of progress, if some time has passed since the one before."""
    before = time.monotonic()

    def say(text: str) -> None:
        nonlocal before
        if time.monotonic() - before >= SECONDS_BETWEEN_LINES:
            before = time.monotonic()
            print(f"weft: {text}", file=sys.stderr, flush=True)

    return say


def _info(options: argparse.Namespace) -> int:
    from weft import data

    graph = data.load(options.graph, verify=options.verify or None)
    if options.verify and graph.path is None:
        raise InputError(f"--verify has no effect on {options.graph}, which is no graph folder: leave it out")
    _describe(graph)
    if options.verify:
        print(f"{'checksums':17} all as written")
    return 0


def _describe(graph: Graph) -> None:
    """Prints one fact a line."""
    degree, several = graph.in_edges.degree, " (several per vertex)" if graph.multilabel else ""
    most = int(degree.max()) if len(degree) else 0
    facts = {
        "name": graph.name,
        "vertices": f"{graph.num_vertices:,}",
        "edges": f"{graph.num_edges:,}",
        "in-degree": f"mean {graph.num_edges / max(len(degree), 1):.1f}, most {most}",
        "isolated targets": f"{int((degree == 0).sum()):,}",
        "edge weights": "yes" if graph.in_edges.weight is not None else "no",
        "edge features": graph.num_edge_features,
        "relations": len(graph.relations),
        "ids": "numbers from 0 on" if graph.vertex_names is None else graph.vertex_names.column,
        "numbering": "original" if graph.ids is None else "reordered",
        "features": graph.num_features,
        "values" if graph.label_kind == "values" else "classes": f"{graph.num_classes}{several}",
        "fingerprint": graph.fingerprint,
    }
    for split in ("train", "val", "test"):
        mask = getattr(graph, f"{split}_mask")
        facts[f"{split} vertices"] = "no split" if mask is None else f"{int(mask.sum()):,}"
    for split in ("val", "test") if graph.test_links is not None else ():
        links = getattr(graph, f"{split}_links")
        facts[f"{split} links"] = "none" if links is None else f"{len(links):,}"
    for name, value in facts.items():
        print(f"{name:17} {value}")
