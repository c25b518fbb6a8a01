"""Layers and models, written for one device, over a View."""

from weft.nn.conv import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv
from weft.nn.decoder import Decoder, DistMult, Dot, LinkModel, make_decoder
from weft.nn.dense import Linear, linear, use_onednn
from weft.nn.families import GAT, GCN, GIN, MODELS, RGCN, SAGE, GATv2, from_config, make_model
from weft.nn.norm import BatchNorm, LayerNorm
from weft.nn.outline import GraphOperation, outline
from weft.nn.pairs import PairMaps, PairRows, Pairs, mean_scale
from weft.nn.pyg import PyGConv, from_pyg
from weft.nn.rgcn import OneHotRGCNConv, RGCNConv
from weft.nn.stack import Decoupled, RowLayer, Stack
from weft.nn.topology import Product, SubTopology, Topology
from weft.nn.typed import (
    Embedding,
    TypedInput,
    embedding_rows,
    embeddings,
    is_embedded,
    keep_rows,
    shared_parameters,
    typed_rows,
)
from weft.nn.view import GraphView, Inputs, TypedRows, UnitCost, View, even_heads, logits_of_pairs, multiply

__all__ = [
    "GAT",
    "GCN",
    "GIN",
    "MODELS",
    "RGCN",
    "SAGE",
    "BatchNorm",
    "Decoder",
    "Decoupled",
    "DistMult",
    "Dot",
    "Embedding",
    "GATConv",
    "GATv2",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "GraphOperation",
    "GraphView",
    "Inputs",
    "LayerNorm",
    "Linear",
    "LinkModel",
    "OneHotRGCNConv",
    "PairMaps",
    "PairRows",
    "Pairs",
    "Product",
    "PyGConv",
    "RGCNConv",
    "RowLayer",
    "SAGEConv",
    "Stack",
    "SubTopology",
    "Topology",
    "TypedInput",
    "TypedRows",
    "UnitCost",
    "View",
    "embedding_rows",
    "embeddings",
    "even_heads",
    "from_config",
    "from_pyg",
    "is_embedded",
    "keep_rows",
    "linear",
    "logits_of_pairs",
    "make_decoder",
    "make_model",
    "mean_scale",
    "multiply",
    "outline",
    "shared_parameters",
    "typed_rows",
    "use_onednn",
]
