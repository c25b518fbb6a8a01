"""`load`: a graph by name, path or recipe."""

from __future__ import annotations

import os
from pathlib import Path

from weft.core.errors import InputError, unknown
from weft.data import edgelist, generate, npz
from weft.data.digits import digits
from weft.data.downloads import LOADERS, download
from weft.data.graph import Graph
from weft.data.inverse import with_inverse_relations
from weft.data.manifest import is_store
from weft.data.order import reorder
from weft.data.splits import with_normalized_features, with_random_classes, with_random_features
from weft.data.store import open_store

BUILT_IN = {"digits": digits}
SUFFIXES = (".npz", ".npy", *edgelist.TEXT_SUFFIXES, ".gz")


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
    verify: bool = True,
) -> Graph:
    """A graph by name, path or recipe; the first of these that fits:

    1. a recipe, `rmat:...` or `sbm:...` (see weft.data.generate);
    2. a path: has a separator or a known suffix, or is a store folder. A folder is a store (`verify` as in open_store);
       .npz see weft.data.npz; .txt .csv .tsv (also .gz) and .npy see weft.data.edgelist;
    3. a built-in name: `digits`;
    4. the name of an .npz file in the folder that the environment variable WEFT_DATA names;
    5. a public data set through PyG, fetched into `root` (default ~/.cache/weft); see weft.data.downloads.LOADERS.

    random_features and random_classes draw that many features per vertex, or classes with a random split, for a graph
    that has none. `seed` is for these, for splits of labelled graphs that come without, and for recipes that state
    none. `split` picks one of several public splits. normalize_features divides every vertex's features by the sum of
    their absolute values. inverse_relations adds an edge against every one (see weft.data.inverse). `order` renumbers
    the vertices last of all (see weft.data.order).

    Raises InputError for an unknown name, with the nearest known one, and for everything that makes a file no graph.
    """
    graph = find(str(name_or_path), seed, root, split, verify)
    if random_features:
        graph = with_random_features(graph, random_features, seed)
    if random_classes:
        graph = with_random_classes(graph, random_classes, seed)
    if normalize_features:
        graph = with_normalized_features(graph)
    if inverse_relations:
        graph = with_inverse_relations(graph)
    return reorder(graph, order)


def find(name: str, seed: int, root: str | Path | None, split: int, verify: bool) -> Graph:
    """The graph itself, as it is stored, fetched or generated."""
    if name.partition(":")[0] in generate.GENERATORS and ":" in name:
        return generate.generate(name, seed)
    path = Path(name).expanduser()
    if is_path(name, path):
        return load_path(path, seed, split, verify)
    known = name.lower().replace("-", "_")
    if known in BUILT_IN:
        return BUILT_IN[known]()
    files = data_files()
    if name in files or known in files:
        return npz.read_npz(files.get(name) or files[known], split=split, seed=seed)
    if known in LOADERS:
        return download(known, Path(root or Path.home() / ".cache" / "weft").expanduser(), seed=seed)
    raise unknown("dataset", name, {*BUILT_IN, *files, *LOADERS, *(f"{kind}:" for kind in generate.GENERATORS)})


def is_path(name: str, path: Path) -> bool:
    """Whether a name means a file or a folder."""
    separators = {os.sep, os.altsep or os.sep}
    return any(s in name for s in separators) or path.suffix in SUFFIXES or is_store(path)


def load_path(path: Path, seed: int, split: int, verify: bool) -> Graph:
    """The graph in a file or a store folder."""
    if path.is_dir():
        return open_store(path, verify=verify)
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if not path.exists():
        raise InputError(f"{path}: no such file or folder: check the path")
    if path.suffix == ".npz":
        return npz.read_npz(path, split=split, seed=seed)
    if path.suffix == ".npy" or suffix in edgelist.TEXT_SUFFIXES:
        return edgelist.read_edges(path)
    raise InputError(
        f"{path}: unknown kind of file '{suffix}': give a store folder, .npz, .npy, .txt, .csv or .tsv (or .gz)"
    )


def data_files() -> dict[str, Path]:
    """The .npz files in the folder that WEFT_DATA names, by name."""
    folder = os.environ.get("WEFT_DATA")
    return {path.stem: path for path in sorted(Path(folder).glob("*.npz"))} if folder else {}
