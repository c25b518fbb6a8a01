"""The fields of a graph, unchecked: the result of readers and the input of writers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.checks.tensor_checks import MASKS, has_label, label_kind
from weft.data.tables.schema import Schema
from weft.data.vertex_names import VertexNames
from weft.storage.quantized_table import FeatureTable
from weft.utils.errors import check_word

EDGE_ARRAYS = {name: f"edge_labels_{name}" for name in ("edges", "y", *MASKS, "features")}
"""File name of each array of `EdgeLabels` in a graph folder."""


class Labels:
    """Labels y of n rows, which are vertices or edges, with masks of those to train, validate and test on."""

    name: str
    """Name of the labelled rows in messages."""
    y: Tensor | None
    """Labels; see `GraphFields.y`."""

    @cached_property
    def label_kind(self) -> str:
        """Kind of the labels y: 'classes', 'labels' (several per row), 'values' (of a regression); '' without y."""
        return "" if self.y is None else label_kind(self.y)

    @cached_property
    def num_classes(self) -> int:
        """C: one more than the largest class, or the columns of y (1 for values [n]); 0 without labels."""
        if self.y is None or not len(self.y):
            return 0
        if self.y.dim() == 2:
            return self.y.shape[1]
        return int(self.y.max()) + 1 if self.label_kind == "classes" else 1

    def labelled(self, split: str) -> Tensor | None:
        """Return the labelled rows of a split ('train', 'val' or 'test'), bool [n]; None without mask or labels."""
        check_word("split", split, ("train", "val", "test"))
        mask: Tensor | None = getattr(self, f"{split}_mask")
        if mask is None or self.y is None:
            return None
        return mask & has_label(self.y)


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgeLabels(Labels):
    """Edges with labels, which a model for `--task edge` predicts. Those to validate or test on carry no messages."""

    edges: Tensor
    """int64 [m, 3]: rows (source, target, relation or 0). Two edges may be equal, such as two transactions."""
    y: Tensor
    """Label of each edge, in one of the forms of `GraphFields.y`."""
    train_mask: Tensor
    """bool [m]: edges to train on. They also are edges of the graph, and carry messages."""
    val_mask: Tensor
    """bool [m]: edges to validate on. They are no edges of the graph."""
    test_mask: Tensor
    """bool [m]: edges to test on, or without a label, to predict. They are no edges of the graph."""
    features: Tensor | None = None
    """float32 [m, K]: features of the labelled edges, which the decoder reads."""
    name: str = "edge_labels"
    """Name in messages."""

    @property
    def num_features(self) -> int:
        """K, the number of columns of `features`; 0 without them."""
        return 0 if self.features is None else self.features.shape[1]

    def pairs(self, positions: Tensor) -> Tensor:
        """Return rows (source, target, position) of labelled edges, int64 [k, 3].

        Args:
            positions: Positions of the edges among the labelled ones, int64 [k].
        """
        return torch.cat([self.edges[positions, :2], positions[:, None]], 1)

    def training_pairs(self) -> Tensor:
        """Return rows (source, target, position) of the labelled training edges, int64 [k, 3]."""
        return self.pairs((self.train_mask & has_label(self.y)).nonzero()[:, 0])

    def arrays(self) -> dict[str, Tensor]:
        """Return the arrays that a graph folder stores, by file name."""
        arrays = {file: getattr(self, name) for name, file in EDGE_ARRAYS.items()}
        return {file: tensor for file, tensor in arrays.items() if tensor is not None}


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphFields:
    """Arrays of a graph of N vertices and E edges. `Graph` adds checks and derived figures."""

    in_edges: Adjacency
    """Edges over all N vertices, with constant weights if there are any; in a typed graph, those of all relations."""
    x: FeatureTable | None = None
    """float32, float16 or bfloat16 [N, F], or int8 with scales (`QuantizedTable`): features.

    Models read them in the type of their rows; `x[rows]` returns floats for every type.
    """
    y: Tensor | None = None
    """Labels in one of three forms, distinguished by dtype and values.

    int64 [N]: classes, -1 if unlabelled. float32 [N, C] of 0 and 1: several labels per vertex. float32 [N], or [N, T]
    that contains other numbers: values of a regression, NaN if unlabelled.
    """
    train_mask: Tensor | None = None
    """bool [N]: vertices to train on."""
    val_mask: Tensor | None = None
    """bool [N]: vertices to validate on."""
    test_mask: Tensor | None = None
    """bool [N]: vertices to test on."""
    name: str = "graph"
    """Name of the graph in messages."""
    edge_type: Tensor | None = None
    """int16 (int32 from 32,768 relations on) [E] in stored order: position of each edge's relation in `relations`."""
    relations: tuple[str, ...] = ()
    """Name of each relation, 'source type|name|target type'."""
    edge_features: Tensor | None = None
    """float32 [E, K] in stored order: features of the edges."""
    vertex_types: tuple[str, ...] = ()
    """Names of the vertex types, in the order of their ids."""
    type_offsets: tuple[int, ...] = ()
    """Id ranges of the vertex types: type t has the ids type_offsets[t] to type_offsets[t + 1] - 1."""
    features: Mapping[str, FeatureTable] = field(default_factory=dict)
    """Features [n_t, F_t] by vertex type, if types differ in width or some have none; x is None then."""
    val_links: Tensor | None = None
    """int64 [m, 3]: edges held out to validate link prediction, as rows (source, target, relation or 0)."""
    test_links: Tensor | None = None
    """int64 [m, 3]: edges held out to test link prediction, as rows (source, target, relation or 0)."""
    edge_labels: EdgeLabels | None = None
    """Labelled edges, for a task on edges."""
    ids: Tensor | None = None
    """int64 [N]: original id of each vertex of a reordered graph (weft.data.vertex_order); None: not reordered."""
    vertex_names: VertexNames | None = None
    """Names of the vertices in the graph's source, by original id; None: they are numbered from 0."""
    schema: Schema | None = None
    """Tables that the graph comes from, with fitted transforms and class names; None for other sources."""
