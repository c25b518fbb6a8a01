"""Public data sets through PyG's loaders, which download, unpack and convert.

weft never unpickles files. PyG does: its Planetoid loader unpickles the raw files that it downloaded, and all its
loaders keep a processed copy as a torch file. To avoid that, give an .npz file instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.data.fields import GraphFields
from weft.data.io.pyg import from_pyg
from weft.data.splits import split_labelled
from weft.data.tensor_checks import MASKS
from weft.utils.errors import InputError
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
        data = kind(*arguments)[0]
    except Exception as error:  # PyG raises whatever its network, archive and array libraries raise
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        if unreachable(error):
            remedy = f"put the raw files into {raw} yourself, or give a graph file"
            raise InputError(f"{name}: cannot fetch {address(kind, loader)} ({cause}): {remedy}") from error
        raise InputError(
            f"{name}: PyG cannot read the files in {raw} ({cause}): delete that folder to fetch anew"
        ) from error
    fields = from_pyg(data, name=name)
    if fields.y is not None and all(getattr(fields, mask) is None for mask in MASKS):
        return replace(fields, **split_labelled(fields.y, seed)._asdict())
    return fields


def unreachable(error: Exception) -> bool:
    """Return whether an error came from the network: errors of urllib and most of aiohttp are OSErrors."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("aiohttp", "http")


def address(kind: Any, loader: Loader) -> str:
    """Return where a loader's raw files come from: PyG has an address, or the id of a first file on Google Drive.

    Args:
        kind: The class of torch_geometric.datasets.
        loader: Its arguments.
    """
    if hasattr(kind, "url"):
        return str(kind.url).format(loader.argument)
    return f"https://drive.usercontent.google.com/download?id={kind.adj_full_id}"
