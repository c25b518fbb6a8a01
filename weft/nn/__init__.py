"""Layers and models, written for one device, over a View."""

from weft.nn.conv import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv
from weft.nn.decoder import Decoder, DistMult, Dot, LinkModel, make_decoder
from weft.nn.dense import Linear, linear, use_onednn
from weft.nn.models import GAT, GCN, GIN, MODELS, SAGE, Decoupled, GATv2, RowLayer, Stack, from_config, make_model
from weft.nn.norm import BatchNorm, LayerNorm
from weft.nn.outline import GraphOperation, outline
from weft.nn.pyg import PyGConv, from_pyg
from weft.nn.topology import Product, SubTopology, Topology
from weft.nn.view import GraphView, Inputs, UnitCost, View, even_heads, logits_of_pairs, multiply

__all__ = [
    "GAT",
    "GCN",
    "GIN",
    "MODELS",
    "SAGE",
    "BatchNorm",
    "Decoder",
    "Decoupled",
    "DistMult",
    "Dot",
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
    "Product",
    "PyGConv",
    "RowLayer",
    "SAGEConv",
    "Stack",
    "SubTopology",
    "Topology",
    "UnitCost",
    "View",
    "even_heads",
    "from_config",
    "from_pyg",
    "linear",
    "logits_of_pairs",
    "make_decoder",
    "make_model",
    "multiply",
    "outline",
    "use_onednn",
]
