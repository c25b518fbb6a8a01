"""Held-out links, or labels of edges, from the three graphs that PyG's RandomLinkSplit returns."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.data.checks.tensor_checks import DataWarning, as_labels, vertex_ids
from weft.data.fields import EdgeLabels, GraphFields
from weft.data.io.pyg import PygGraph, read
from weft.data.vertex_types import type_range
from weft.utils.errors import InputError, readable

LABELLED, POSITIVE, NEGATIVE = "edge_label_index", "pos_edge_label_index", "neg_edge_label_index"
"""Attributes in which RandomLinkSplit stores links, the last two with split_labels=True."""


class SplitLinks(NamedTuple):
    """Links of one of the graphs that RandomLinkSplit returns."""

    links: Tensor
    """int64 [m, 3]: links with label 1, as rows (source, target, relation)."""
    num_negatives: int
    """Number of links with label 0."""
    y: Tensor
    """Label of each link, [m, ...]."""


def with_split_links(fields: GraphFields, data: PygGraph, val: PygGraph | None, test: PygGraph | None) -> GraphFields:
    """Return a graph with the held-out links of RandomLinkSplit; negative links are left out, with a DataWarning.

    Args:
        fields: The graph that was read from `data`.
        data: First result of RandomLinkSplit, or any PyG graph without links.
        val: Second result, whose links validate; None: there are none.
        test: Third result, whose links test; None: there are none.

    Raises:
        InputError: If `data` has links although `val` and `test` are missing, or has links that are no edges. If `val`
            or `test` has no links, or links that weft cannot represent.
    """
    held_out: dict[str, Any] = {}
    with readable("data", "give the graphs that RandomLinkSplit returns"):
        train_links = split_links(data, fields, "data")
        num_negatives = 0 if train_links is None else train_links.num_negatives
        for name, part in (("val", val), ("test", test)):
            if part is None:
                continue
            if type(part) is not type(data):
                kinds = f"{name} is of type {type(part).__name__}, data of type {type(data).__name__}"
                raise InputError(f"{kinds}: give both of one type")
            links = split_links(part, fields, name)
            if links is None:
                raise InputError(f"{name} has no {LABELLED}: give the graph that RandomLinkSplit returns for it")
            held_out[f"{name}_links"] = links.links
            num_negatives += links.num_negatives
    if train_links is not None:
        if not held_out:
            raise InputError(
                f"data has {LABELLED}, links of RandomLinkSplit that would be lost: use Graph.from_pyg(train, val=val, "
                "test=test), or delete the attribute"
            )
        require_edges(fields, train_links.links)
    if num_negatives:
        warnings.warn(
            f"{fields.name}: {num_negatives} negative links of RandomLinkSplit are left out, as weft draws its own: "
            "split with add_negative_train_samples=False and neg_sampling_ratio=0",
            DataWarning,
            stacklevel=3,
        )
    return replace(fields, **held_out)


def with_split_labels(fields: GraphFields, data: PygGraph, val: PygGraph, test: PygGraph) -> GraphFields:
    """Return a graph with labels of edges, the `edge_label` of the three graphs that RandomLinkSplit returns.

    Args:
        fields: The graph that was read from `data`.
        data: First result of RandomLinkSplit.
        val: Second result.
        test: Third result.

    Raises:
        InputError: If one of them has no labels, or labels of links that weft cannot represent.
    """
    parts = []
    with readable("data", "give the graphs that RandomLinkSplit returns"):
        for name, part in (("data", data), ("val", val), ("test", test)):
            links = split_links(part, fields, name, labelled=True)
            if links is None:
                raise InputError(f"{name} has no {LABELLED}: give the graph that RandomLinkSplit returns for it")
            parts.append(links)
    require_edges(fields, parts[0].links)
    split = torch.arange(3).repeat_interleave(torch.tensor([len(part.links) for part in parts]))
    labels = EdgeLabels(
        edges=torch.cat([part.links for part in parts]),
        y=as_labels(torch.cat([part.y for part in parts])),
        train_mask=split == 0,
        val_mask=split == 1,
        test_mask=split == 2,
    )
    return replace(fields, edge_labels=labels)


def require_edges(fields: GraphFields, links: Tensor) -> None:
    """Check that training links are edges in one direction at least.

    Args:
        fields: The graph.
        links: int64 [m, 3].

    Raises:
        InputError: At the first link that is no edge.
    """
    size = fields.in_edges.num_targets
    source, target = fields.in_edges.edges()
    codes = torch.cat([source * size + target, target * size + source])
    missing = ~torch.isin(links[:, 0] * size + links[:, 1], codes)
    if missing.any():
        raise InputError(
            f"data.{LABELLED}: {int(missing.sum())} training links are no edges, but weft trains on the graph's edges: "
            "use RandomLinkSplit with disjoint_train_ratio=0"
        )


def split_links(data: PygGraph, fields: GraphFields, place: str, *, labelled: bool = False) -> SplitLinks | None:
    """Return the links of one of the graphs that RandomLinkSplit returns; None if there are none.

    Args:
        data: The PyG graph.
        fields: The graph that was read from the first of them.
        place: Name of the PyG graph in errors.
        labelled: True if edge_label is a label to predict, instead of 1 for a link and 0 for a negative sample.

    Raises:
        InputError: If links have other labels than 0 and 1, or do not say which of several relations they have.
    """
    if not hasattr(data, "edge_types"):
        links = positive_links(data, place, labelled=labelled)
        if links is not None and fields.relations:
            raise InputError(f"{place}.{LABELLED} has no relations: give val_links and test_links of Graph.from_edges")
        return links
    parts, labels, num_negatives = [], [], 0
    for relation in data.edge_types:
        name = "|".join(relation)
        part = positive_links(data[relation], f"{place}[{', '.join(relation)}]", labelled=labelled)
        if part is None:
            continue
        if name not in fields.relations:
            raise InputError(f"{place} has links of {name}, which data does not have: give the same relations in all")
        firsts = [type_range(fields, vertex_type).start for vertex_type in relation[::2]]
        parts.append(part.links + torch.tensor([*firsts, fields.relations.index(name)]))
        labels.append(part.y)
        num_negatives += part.num_negatives
    return SplitLinks(torch.cat(parts), num_negatives, torch.cat(labels)) if parts else None


def positive_links(store: Any, place: str, *, labelled: bool) -> SplitLinks | None:
    """Return the links of a Data or of one relation, with relation 0; None if there are none.

    Args:
        store: The Data, or the store of a relation.
        place: Name of the store in errors.
        labelled: True if edge_label is a label to predict, instead of 1 for a link and 0 for a negative sample.

    Raises:
        InputError: If links have other labels than 0 and 1, or another shape.
    """
    name = POSITIVE if POSITIVE in store else LABELLED
    pairs, label = read(store, name), read(store, "edge_label") if name == LABELLED else None
    if pairs is None:
        return None
    if pairs.dim() != 2 or len(pairs) != 2 or (label is not None and label.shape[:1] != pairs.shape[1:]):
        raise InputError(f"{place}.{name} has shape {list(pairs.shape)}: links are [2, m], with one edge_label each")
    links = torch.stack([vertex_ids(f"{place}.{name}[{row}]", pairs[row]).long() for row in (0, 1)], 1)
    label = torch.ones(len(links), dtype=torch.int64) if label is None else label
    positive = torch.ones(len(links), dtype=torch.bool) if labelled else label == 1
    if not labelled and not (positive | (label == 0)).all():
        raise InputError(f"{place}.edge_label has other values than 0 and 1: weft predicts links, not their classes")
    negatives = read(store, NEGATIVE) if name == POSITIVE else None
    num_negatives = int((~positive).sum()) if negatives is None else negatives.shape[1]
    links = torch.nn.functional.pad(links[positive], (0, 1))
    return SplitLinks(links, num_negatives, label[positive])
