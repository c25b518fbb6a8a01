"""Public data sets, which PyG's loaders download and weft reads.

PyG's loaders also unpickle: the raw files of Planetoid, and the processed copies that they keep as torch files. So they
only download here, and weft reads the raw files itself (weft.data.io.published.raw_datasets).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.data.checks.tensor_checks import MASKS
from weft.data.fields import GraphFields
from weft.data.io.published.raw_datasets import READERS
from weft.data.splits import split_labelled
from weft.utils.errors import InputError, readable
from weft.utils.optional_packages import import_extra


@dataclass(frozen=True, kw_only=True)
class Loader:
    """A class of torch_geometric.datasets and its arguments."""

    kind: str
    """Name of the class."""
    argument: str | None = None
    """Name of the data set as an argument of the class; None: the class has no such argument."""
    raw: str = "raw"
    """Folder of the raw files, below the root."""


LOADERS = {
    "amazon_computers": Loader(kind="Amazon", argument="Computers", raw="Computers/raw"),
    "amazon_photo": Loader(kind="Amazon", argument="Photo", raw="Photo/raw"),
    "citeseer": Loader(kind="Planetoid", argument="CiteSeer", raw="CiteSeer/raw"),
    "coauthor_cs": Loader(kind="Coauthor", argument="CS", raw="CS/raw"),
    "coauthor_physics": Loader(kind="Coauthor", argument="Physics", raw="Physics/raw"),
    "cora": Loader(kind="Planetoid", argument="Cora", raw="Cora/raw"),
    "cora_full": Loader(kind="CitationFull", argument="cora", raw="cora/raw"),
    "cora_ml": Loader(kind="CitationFull", argument="cora_ml", raw="cora_ml/raw"),
    "dblp": Loader(kind="CitationFull", argument="dblp", raw="dblp/raw"),
    "flickr": Loader(kind="Flickr"),
    "pubmed": Loader(kind="Planetoid", argument="PubMed", raw="PubMed/raw"),
    "reddit": Loader(kind="Reddit"),
    "yelp": Loader(kind="Yelp"),
}


def download(name: str, root: Path, *, seed: int = 0) -> GraphFields:
    """Download a data set, unless it is there already, and return its fields.

    Data sets without a public split get a seeded 60/20/20 split.

    Args:
        name: Name of the data set in LOADERS.
        root: Folder of all downloads; the data set is in `root`/`name`.
        seed: Seed of a split.

    Raises:
        InputError: If the network does not answer, with the address and the folder to fill by hand, or if the files in
            that folder cannot be read.
    """
    datasets = import_extra("torch_geometric.datasets", name)
    loader = LOADERS[name]
    kind = getattr(datasets, loader.kind)
    arguments = [str(root / name)] if loader.argument is None else [str(root / name), loader.argument]
    raw = root / name / loader.raw
    try:
        without_processing(kind)(*arguments)
    except Exception as error:  # PyG raises whatever its network and archive libraries raise
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        remedy = f"put the raw files into {raw} yourself, or give a graph file"
        raise InputError(f"{name}: cannot fetch {address(kind, loader)} ({cause}): {remedy}") from error
    try:
        with readable(raw, "fetch its files again"):
            fields = replace(READERS[loader.kind](raw), name=name)
    except InputError as error:
        raise InputError(f"{name}: delete {raw} to fetch its files again: {error}") from error
    if fields.y is not None and all(getattr(fields, mask) is None for mask in MASKS):
        return replace(fields, **split_labelled(fields.y, seed)._asdict())
    return fields


def without_processing(kind: Any) -> Any:
    """Return a class of torch_geometric.datasets that downloads raw files, if they are not there, and reads no file."""

    def do_nothing(*_: object) -> None:
        pass

    return type(kind.__name__, (kind,), {"_process": do_nothing, "load": do_nothing})


def address(kind: Any, loader: Loader) -> str:
    """Return where a loader's raw files come from: PyG has an address, or the id of a first file on Google Drive.

    Args:
        kind: The class of torch_geometric.datasets.
        loader: Its arguments.
    """
    if hasattr(kind, "url"):
        return str(kind.url).format(loader.argument)
    return f"https://drive.usercontent.google.com/download?id={kind.adj_full_id}"
