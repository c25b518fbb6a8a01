"""Readers of the raw files of public data sets. They give the graph that PyG's own classes give.

PyG unpickles the raw files of Planetoid, and its processed copy of every data set. These readers unpickle nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.data.checks.tensor_checks import check_ids, check_length, check_pointers, user_labels, vertex_ids
from weft.data.edges import both_ways, build
from weft.data.fields import GraphFields
from weft.data.io.npz_arrays import Arrays, read_all, read_features, required_array, whole_numbers
from weft.data.io.published.pickled_arrays import PickledCsr, read_pickled
from weft.data.splits import Masks
from weft.data.store.npy import as_tensor, map_array
from weft.runtime.memory.limit import check_fits_memory
from weft.utils.files.file_reading import MAX_JSON_BYTES, read_text

NUM_VALIDATION = 500
"""Number of validation vertices in the public splits of Planetoid. They follow the training vertices."""


def read_planetoid(raw: Path) -> GraphFields:
    """Return a graph of Planetoid (Yang et al., 2016), with its public split.

    The test vertices' rows of features and labels are in files of their own (tx, ty), in the order of test.index. Ids
    that are missing there have neither (isolated vertices of CiteSeer); like in PyG, their class is 0.

    Args:
        raw: Folder of the files ind.NAME.x, y, tx, ty, allx, ally, graph and test.index.
    """
    (prefix,) = {path.name.removesuffix(".test.index") for path in raw.glob("ind.*.test.index")}
    read = {name: read_pickled(raw / f"{prefix}.{name}") for name in ("tx", "ty", "allx", "ally", "y", "graph")}
    lines = read_text(raw / f"{prefix}.test.index", MAX_JSON_BYTES).split()
    test_ids = vertex_ids("test.index", torch.tensor([int(line) for line in lines])).long()
    untested, tested = dense(read["allx"], "allx"), dense(read["tx"], "tx")
    num_vertices = max(len(untested), int(test_ids.max()) + 1)
    check_fits_memory(4 * num_vertices * untested.shape[1], "the features", "fetch the files again")
    check_length("tx", tested, len(test_ids), "ids in test.index")
    x = torch.zeros(num_vertices, untested.shape[1])
    x[: len(untested)], x[test_ids] = untested, tested
    classes = torch.zeros(num_vertices, read["ally"].shape[1])
    classes[: len(untested)], classes[test_ids] = (as_tensor(name, read[name]).float() for name in ("ally", "ty"))
    masks = torch.zeros(3, num_vertices, dtype=torch.bool)
    num_train = len(read["y"])
    masks[0, :num_train] = masks[1, num_train : num_train + NUM_VALIDATION] = masks[2, test_ids] = True
    neighbours: dict[int, list[int]] = read["graph"]
    pairs = [(vertex, neighbour) for vertex, ids in neighbours.items() for neighbour in ids]
    source, target = vertex_ids("graph", torch.tensor(pairs).view(-1)).view(-1, 2).unbind(1)
    no_loop = source != target
    return fields(*distinct(source[no_loop], target[no_loop]), x, classes.argmax(1), Masks(*masks.unbind()))


def dense(value: Any, name: str) -> Tensor:
    """Return features as a dense float32 tensor [n, F].

    Args:
        value: A `PickledCsr`, or an array.
        name: Name of the file in errors.
    """
    if not isinstance(value, PickledCsr):
        return as_tensor(name, value).float()
    arrays = {f"{name}_{part}": value.part(part) for part in ("data", "indices", "indptr")}
    features = read_features({**arrays, f"{name}_shape": np.array(value.shape)}, name)
    assert features is not None
    return features


def read_gnn_benchmark(raw: Path) -> GraphFields:
    """Return a graph of Shchur et al. (2018) or Bojchevski and Günnemann (2018), undirected, without a split.

    Args:
        raw: Folder of one .npz file with the CSR parts of features and adjacency, and labels.
    """
    (path,) = raw.glob("*.npz")
    parts = ("data", "indices", "indptr", "shape")
    arrays = read_all(path, ("labels", *(f"{key}_{part}" for key in ("adj", "attr") for part in parts)))
    x, y = read_features(arrays, "attr"), as_tensor("labels", required_array(arrays, "labels")).long()
    assert x is not None
    source, target = csr_edges(arrays, "adj_")
    no_loop = source != target
    source, target, _ = both_ways(source[no_loop], target[no_loop])
    return fields(source, target, x.masked_fill_(x > 0, 1), y, Masks())


def read_graphsaint(raw: Path) -> GraphFields:
    """Return a graph of GraphSAINT (Zeng et al., 2020), with its split.

    Args:
        raw: Folder of adj_full.npz, feats.npy, class_map.json and role.json.
    """
    arrays = read_all(raw / "adj_full.npz", ("data", "indices", "indptr", "shape"))
    source, target = csr_edges(arrays, "")
    x = as_tensor("feats", map_array(raw / "feats.npy")).float()
    labels = json.loads(read_text(raw / "class_map.json", MAX_JSON_BYTES))
    y = torch.tensor([labels.get(str(vertex), -1) for vertex in range(len(x))])
    roles = json.loads(read_text(raw / "role.json", MAX_JSON_BYTES))
    masks = torch.zeros(3, len(x), dtype=torch.bool)
    for mask, role in zip(masks, ("tr", "va", "te"), strict=True):
        mask[vertex_ids(f"role.json {role}", torch.tensor(roles[role])).long()] = True
    return fields(source, target, x, y, Masks(*masks.unbind()))


def read_reddit(raw: Path) -> GraphFields:
    """Return the graph of Reddit posts (Hamilton et al., 2017), with its split.

    Args:
        raw: Folder of reddit_data.npz and reddit_graph.npz.
    """
    arrays = read_all(raw / "reddit_data.npz", ("feature", "label", "node_types"))
    x, y, roles = (as_tensor(key, required_array(arrays, key)) for key in ("feature", "label", "node_types"))
    edges = read_all(raw / "reddit_graph.npz", ("row", "col"))
    source, target = (vertex_ids(key, as_tensor(key, required_array(edges, key))) for key in ("row", "col"))
    masks = Masks(*(roles == role for role in (1, 2, 3)))
    return fields(*distinct(source, target), x.float(), y.long(), masks)


def csr_edges(arrays: Arrays, prefix: str) -> tuple[Tensor, Tensor]:
    """Return sources (rows) and targets (columns) of a CSR adjacency matrix.

    Args:
        arrays: Arrays of a file by key.
        prefix: Start of the keys.
    """
    num_rows, num_columns = whole_numbers(arrays, f"{prefix}shape", 2)
    indptr, indices = (
        vertex_ids(key, as_tensor(key, required_array(arrays, key))).long()
        for key in (f"{prefix}indptr", f"{prefix}indices")
    )
    check_length(f"{prefix}indptr", indptr, num_rows + 1, "rows, and one more")
    check_pointers(f"{prefix}indptr", indptr, len(indices), "fetch the file again")
    check_ids(f"{prefix}indices", indices, num_columns)
    return torch.arange(num_rows).repeat_interleave(indptr.diff()), indices


def distinct(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return sources and targets without duplicate edges.

    Args:
        source: Integer [E].
        target: Integer [E].
    """
    first, second = torch.stack([source.long(), target.long()]).unique(dim=1).unbind()
    return first, second


def fields(source: Tensor, target: Tensor, x: Tensor, y: Tensor, masks: Masks) -> GraphFields:
    """Return the fields of a graph.

    Args:
        source: Integer [E].
        target: Integer [E].
        x: Features [N, F].
        y: Labels [N] or [N, C].
        masks: The public split, without masks if there is none.
    """
    return replace(build(source, target, num_vertices=len(x)), x=x, y=user_labels(y), **masks._asdict())


READERS: dict[str, Callable[[Path], GraphFields]] = {
    "Amazon": read_gnn_benchmark,
    "CitationFull": read_gnn_benchmark,
    "Coauthor": read_gnn_benchmark,
    "Flickr": read_graphsaint,
    "Planetoid": read_planetoid,
    "Reddit": read_reddit,
    "Yelp": read_graphsaint,
}
"""Reader of each class of torch_geometric.datasets, which is given the folder of the raw files."""
