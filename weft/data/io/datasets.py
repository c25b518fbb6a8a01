"""Loading of graphs by name, path or recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from weft.data.checks.tensor_checks import located
from weft.data.graph import Graph
from weft.data.inverse_relations import with_inverse_relations
from weft.data.io import generate, npz, ogb
from weft.data.io.described_graph import KIND, is_described
from weft.data.io.digits import digits
from weft.data.io.fill import with_normalized_features, with_random_classes, with_random_features
from weft.data.io.graph_parts import gather_parts
from weft.data.io.npz_arrays import REMEDY
from weft.data.io.published.downloads import LOADERS, download
from weft.data.store.manifest import is_store, require_not_set_aside
from weft.data.tables import edge_list
from weft.data.vertex_order import reorder
from weft.utils.entry_points import load_entry_point
from weft.utils.errors import InputError, readable, unknown
from weft.utils.user_folders import expand_user, home_folder

RECIPE = "rmat:vertices=100k,edges=1m,features=128,classes=16"
BUILT_IN = {"digits": digits}
SUFFIXES = (".npz", ".npy", ".pt", ".pth", ".parquet", ".arrow", ".feather", *edge_list.TEXT_SUFFIXES, ".gz")


REGISTERED: dict[str, Callable[[], Graph]] = {}
"""Functions that `weft.register` has registered as datasets, by name."""


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
    """Load a graph by name, path or recipe.

    The first of these that fits decides:

    1. A recipe, `rmat:...`, `sbm:...` or `cites:...`; see weft.data.io.generate.
    2. A path: it contains a separator, has a known suffix, or is a graph folder. A folder is a graph folder or one of
       OGB's (weft.data.io.ogb). Files: .npz (weft.data.io.npz); .txt, .csv, .tsv, also .gz, and .npy (`read_edges`).
    3. The built-in graph `digits`.
    4. The name of an .npz file in the folder that the environment variable WEFT_DATA names.
    5. A public data set through PyG, downloaded into `root`; see weft.data.io.published.downloads.LOADERS.

    Args:
        name_or_path: Name, path or recipe.
        random_features: Number of random features per vertex, for a graph without features.
        random_classes: Number of random classes, with a random split, for a graph without labels.
        seed: Seed of the random features, classes and splits, and of recipes that state none.
        root: Folder of downloads. Default: ~/.cache/weft.
        split: Number of the public split, if there are several.
        normalize_features: Divide the features of each vertex by the sum of their absolute values.
        inverse_relations: Add an inverse edge for every edge; see weft.data.inverse_relations.
        order: Renumber the vertices, after all other changes; see weft.data.vertex_order.
        verify: Whether to verify checksums; see `Graph.open`.

    Raises:
        InputError: For an unknown name, with the nearest known one, and for files that contain no valid graph.
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
    """Return a graph after the changes that options of `load` request.

    Args:
        graph: The graph.
        random_features: Number of random features per vertex.
        random_classes: Number of random classes.
        seed: Seed of the random features and classes.
        normalize_features: Divide the features of each vertex by the sum of their absolute values.
        inverse_relations: Add an inverse edge for every edge.
        order: Renumber the vertices.

    Raises:
        InputError: If the graph already has what an option would add.
    """
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
    """Return a graph as it is stored, downloaded or generated.

    Args:
        name: Name, path or recipe.
        seed: Seed of splits and recipes.
        root: Folder of downloads.
        split: Number of the public split.
        verify: Whether to verify checksums.

    Raises:
        InputError: If there is no such graph.
    """
    if name in REGISTERED:
        refuse_split(name, split)
        return replace(REGISTERED[name](), name=name)
    if name.partition(":")[0] in generate.GENERATORS and ":" in name:
        refuse_split(name, split)
        return Graph.of(generate.generate(name, seed))
    if is_described(name):
        raise InputError(
            f"{KIND}: describes a graph by its sizes, which only weft plan can use: to train, give a graph such as "
            f"'{RECIPE}'"
        )
    path = expand_user(name)
    with readable(name, "check the path"):
        if is_path(name, path):
            return load_path(path, seed, split, verify)
    dataset = name.lower().replace("-", "_")
    files = data_files()
    if dataset not in BUILT_IN and (name in files or dataset in files):
        return load_npz(files.get(name) or files[dataset], seed, split)
    refuse_split(name, split)
    if dataset in BUILT_IN:
        return Graph.of(BUILT_IN[dataset]())
    if dataset in LOADERS:
        folder = expand_user(root or home_folder() / ".cache" / "weft")
        return Graph.of(download(dataset, folder, seed=seed))
    if path.is_dir():
        return load_path(path, seed, split, verify)
    if (make_graph := load_entry_point("dataset", name)) is not None:
        graph: Graph = make_graph()
        return replace(graph, name=name)
    require_not_set_aside(path)
    raise unknown(
        "dataset", name, {*BUILT_IN, *REGISTERED, *files, *LOADERS, *(f"{kind}:" for kind in generate.GENERATORS)}
    )


def is_path(name: str, path: Path) -> bool:
    """Return whether a name means a file or a folder.

    Args:
        name: The name as given.
        path: The same as a path, with the home folder expanded.
    """
    separators = {os.sep, os.altsep or os.sep}
    looks_like_path = any(s in name for s in separators) or path.suffix in SUFFIXES
    return looks_like_path or is_store(path) or ogb.is_ogb(path)


def load_path(path: Path, seed: int, split: int, verify: bool | None) -> Graph:
    """Return the graph in a file or a folder.

    Args:
        path: The file or folder.
        seed: Seed of a split.
        split: Number of the public split.
        verify: Whether to verify checksums of a graph folder.

    Raises:
        InputError: If it contains no graph.
    """
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
            f"{path}: would have to be unpickled, which weft never does: load it in a script and call "
            "weft.Graph.from_pyg(data).save(folder)"
        )
    if is_edge_list(path):
        return read_edges(path)
    if suffix_of(path) == ".toml":
        raise InputError(f"{path}: a schema of tables must become a graph first: weft data import {path} --out FOLDER")
    raise InputError(
        f"{path}: unknown kind of file '{suffix_of(path)}': give a graph folder, .npz, .npy, .txt, .csv or .tsv (or "
        ".gz), or import a table of edges by 'weft data import --edges'"
    )


def is_edge_list(path: Path) -> bool:
    """Return whether a file's name has the suffix of an edge list."""
    return path.suffix == ".npy" or suffix_of(path) in edge_list.TEXT_SUFFIXES


def suffix_of(path: Path) -> str:
    """Return the suffix of a file's name, without .gz."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def refuse_split(name: str, split: int) -> None:
    """Check that no split is requested from a graph that has only one.

    Args:
        name: Name of the graph.
        split: Number of the requested split; 0: none requested.

    Raises:
        InputError: If one is requested.
    """
    if split:
        raise InputError(f"--split {split}: {name} has no splits to choose from: leave it out")


def load_npz(path: Path, seed: int, split: int) -> Graph:
    """Return the graph in an .npz file.

    Args:
        path: The file.
        seed: Seed of a split.
        split: Number of the public split.
    """
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
    """Return a directed graph from an edge list, one pair `source target` per edge. No edge is reversed or dropped.

    Args:
        path: .txt, .csv or .tsv, also with .gz: two columns, or three with a weight; comment lines (# or %) and one
            header line are skipped. Or .npy: integers (2, E) or (E, 2), memory-mapped if int32 or int64; (2, 2) is read
            as (2, E).
        num_vertices: Number of vertices. Default: the rows of features or labels, else one more than the largest id.
        features: .npy or a text table, one row per vertex.
        labels: .npy or a text table: one column of classes (-1: unlabelled), or one column of 0 and 1 per class.
            Labelled vertices get a seeded 60/20/20 split.
        split: .npy or a text table with train, val or test (or 0, 1 or 2) for each vertex.
        shares: Fractions of a random split, instead of `split`.
        undirected: Add the reverse of each edge and merge duplicates; see GraphParts.
        name: Name of the graph in messages. Default: the file's name.
        seed: Seed of a random split.

    Raises:
        InputError: A line is no edge, or an id is out of range. The message names file, line and content.
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
    """Return the .npz files in the folder that WEFT_DATA names, by name."""
    folder = os.environ.get("WEFT_DATA")
    return {path.stem: path for path in sorted(Path(folder).glob("*.npz"))} if folder else {}
