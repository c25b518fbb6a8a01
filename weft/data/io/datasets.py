"""Graphs by name, path or recipe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weft.data.graph import Graph
from weft.data.inverse_relations import with_inverse_relations
from weft.data.io import generate, npz, ogb
from weft.data.io.described_graph import KIND, is_described
from weft.data.io.digits import digits
from weft.data.io.downloads import LOADERS, download
from weft.data.io.fill import with_normalized_features, with_random_classes, with_random_features
from weft.data.io.graph_parts import gather_parts
from weft.data.io.npz_arrays import REMEDY
from weft.data.store.manifest import is_store, require_not_set_aside
from weft.data.tables import edge_list
from weft.data.tensor_checks import located
from weft.data.vertex_order import reorder
from weft.utils.errors import InputError, readable, unknown

RECIPE = "rmat:vertices=100k,edges=1m,features=128,classes=16"
BUILT_IN = {"digits": digits}
SUFFIXES = (".npz", ".npy", ".pt", ".pth", ".parquet", ".arrow", ".feather", *edge_list.TEXT_SUFFIXES, ".gz")


def load(
    name_or_path: str | Path,
    *,
    random_features: int = 0,
    random_classes: int = 0,
    seed: int = 0,
    root: str | Path | None = None,
    split: int = 0,
    normalize_features: bool = False,
    inverse_relations: bool = False,
    order: str = "none",
    verify: bool | None = None,
) -> Graph:
    """A graph by name, path or recipe; the first of these that fits:

    1. a recipe, `rmat:...` or `sbm:...` (see weft.data.io.generate);
    2. a path: has a separator or a known suffix, or is a store folder. A folder is a store (`verify` as in Graph.open),
       or one of OGB's (weft.data.io.ogb); .npz see weft.data.io.npz; .txt .csv .tsv (also .gz), .npy see read_edges;
    3. a built-in name: `digits`;
    4. the name of an .npz file in the folder that the environment variable WEFT_DATA names;
    5. a public data set through PyG, fetched into `root` (default ~/.cache/weft); see weft.data.io.downloads.LOADERS.

    random_features and random_classes draw that many features per vertex, or classes with a random split, for a graph
    that has none. `seed` is for these, for splits of labelled graphs that come without, and for recipes that state
    none. `split` picks one of several public splits. normalize_features divides every vertex's features by the sum of
    their absolute values. inverse_relations adds an edge against every one (see weft.data.inverse_relations). `order` renumbers
    the vertices last of all (see weft.data.vertex_order).

    Raises InputError for an unknown name, with the nearest known one, and for everything that makes a file no graph.
    """
    graph = find(str(name_or_path), seed, root, split, verify)
    return as_asked(
        graph,
        random_features=random_features,
        random_classes=random_classes,
        seed=seed,
        normalize_features=normalize_features,
        inverse_relations=inverse_relations,
        order=order,
    )


def as_asked(
    graph: Graph,
    *,
    random_features: int = 0,
    random_classes: int = 0,
    seed: int = 0,
    normalize_features: bool = False,
    inverse_relations: bool = False,
    order: str = "none",
) -> Graph:
    """A graph with what these options of `load` say of it. InputError where it has what it is to be given."""
    if random_features:
        graph = with_random_features(graph, random_features, seed)
    if random_classes:
        graph = with_random_classes(graph, random_classes, seed)
    if normalize_features:
        graph = with_normalized_features(graph)
    if inverse_relations:
        graph = with_inverse_relations(graph)
    return reorder(graph, order)


def find(name: str, seed: int, root: str | Path | None, split: int, verify: bool | None) -> Graph:
    """The graph itself, as it is stored, fetched or generated."""
    if name.partition(":")[0] in generate.GENERATORS and ":" in name:
        refuse_split(name, split)
        return Graph.of(generate.generate(name, seed))
    if is_described(name):
        raise InputError(f"{KIND}: is known by its numbers alone: weft plan tells of it; to train, write '{RECIPE}'")
    path = Path(name).expanduser()
    with readable(name, "check the path"):
        if is_path(name, path):
            return load_path(path, seed, split, verify)
    known = name.lower().replace("-", "_")
    files = data_files()
    if known not in BUILT_IN and (name in files or known in files):
        return load_npz(files.get(name) or files[known], seed, split)
    refuse_split(name, split)
    if known in BUILT_IN:
        return Graph.of(BUILT_IN[known]())
    if known in LOADERS:
        folder = Path(root or Path.home() / ".cache" / "weft").expanduser()
        return Graph.of(download(known, folder, seed=seed))
    if path.is_dir():
        return load_path(path, seed, split, verify)
    require_not_set_aside(path)
    raise unknown("dataset", name, {*BUILT_IN, *files, *LOADERS, *(f"{kind}:" for kind in generate.GENERATORS)})


def is_path(name: str, path: Path) -> bool:
    """Whether a name means a file or a folder."""
    separators = {os.sep, os.altsep or os.sep}
    known = any(s in name for s in separators) or path.suffix in SUFFIXES
    return known or is_store(path) or ogb.is_ogb(path)


def load_path(path: Path, seed: int, split: int, verify: bool | None) -> Graph:
    """The graph in a file or a store folder."""
    if path.is_dir() and ogb.is_ogb(path):
        return Graph.of(gather_parts(ogb.ogb_parts(path, split=split)))
    if path.suffix != ".npz":
        refuse_split(str(path), split)
    if path.is_dir():
        return Graph.open(path, verify=verify)
    if not path.exists():
        require_not_set_aside(path)
        raise InputError(f"{path}: no such file or folder: check the path")
    if path.suffix == ".npz":
        return load_npz(path, seed, split)
    if path.suffix in (".pt", ".pth"):
        raise InputError(
            f"{path}: would have to be unpickled, which weft never does: save its graph in a script that has "
            "loaded it, by weft.Graph.from_pyg(data).save(folder)"
        )
    if is_edge_list(path):
        return read_edges(path)
    raise InputError(
        f"{path}: unknown kind of file '{suffix_of(path)}': give a store folder, .npz, .npy, .txt, .csv or .tsv (or "
        ".gz), or import a table of edges by 'weft data import --edges'"
    )


def is_edge_list(path: Path) -> bool:
    """Whether a file's name is one of an edge list's."""
    return path.suffix == ".npy" or suffix_of(path) in edge_list.TEXT_SUFFIXES


def suffix_of(path: Path) -> str:
    """What a file is by its name, packed or not."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def refuse_split(name: str, split: int) -> None:
    """InputError for a split where there are not several."""
    if split:
        raise InputError(f"--split {split}: {name} has no splits to choose from: leave it out")


def load_npz(path: Path, seed: int, split: int) -> Graph:
    """The graph in an .npz file."""
    fields = npz.read_npz(path, split=split, seed=seed)
    with readable(path, REMEDY), located(path):
        return Graph.of(fields)


def read_edges(
    path: str | Path,
    *,
    num_vertices: int | None = None,
    features: str | Path | None = None,
    labels: str | Path | None = None,
    split: str | Path | None = None,
    shares: Sequence[float] | None = None,
    undirected: bool = False,
    name: str | None = None,
    seed: int = 0,
) -> Graph:
    """A directed graph from an edge list: a pair `source target` for each edge. No edge is reversed or dropped.

    path: .txt, .csv or .tsv, also with .gz: two columns, or three with a weight; comment lines (# or %) and one header
    line are skipped. Or .npy, integers (2, E) or (E, 2), memory-mapped where they are int32 or int64; (2, 2) is read as
    (2, E).
    features: .npy or a text table, one row per vertex.
    labels: the same with one column of classes (-1 unlabelled), or one column of 0 and 1 per class; labelled vertices
    get a seeded 60/20/20 split.
    split: .npy or a text table with train, val or test (or 0, 1 or 2) for each vertex; or shares of a split to draw.
    undirected: joins the ends of each edge in both directions, once (see weft.data.io.graph_parts.GraphParts).

    Raises InputError with file, line and content for what is no edge list, and for ids out of range.
    """
    with readable(path, "give a text table of numbers, or an array saved by numpy.save"):
        parts = edge_list.edge_list_parts(
            path,
            num_vertices=num_vertices,
            features=features,
            labels=labels,
            split=split,
            shares=shares,
            undirected=undirected,
            name=name,
            seed=seed,
        )
        edges = list(parts.edges())
        with located(path):
            return Graph.of(gather_parts(replace(parts, edges=lambda: iter(edges))))


def data_files() -> dict[str, Path]:
    """The .npz files in the folder that WEFT_DATA names, by name."""
    folder = os.environ.get("WEFT_DATA")
    return {path.stem: path for path in sorted(Path(folder).glob("*.npz"))} if folder else {}
