"""Layers and models, written as for one device: all access to the graph goes through a `View`."""

from weft.nn.aggregate.aggregate import SLOT_BYTES, Aggregate, Request, Rows, Total, WholeLayer, WorkingSet
from weft.nn.aggregate.attention import Attend, AttendEdges, EdgeSoftmax
from weft.nn.aggregate.reduce import ByRelation, LaplacianSum, Max, Sum
from weft.nn.aggregate.relations import OwnRelationRows, RelationIndex, RelationRows
from weft.nn.aggregate.topology import EdgeSubset, SubTopology, Topology
from weft.nn.aggregate.typed_block import TypedBlock
from weft.nn.convert import Converted, Unconverted, convert
from weft.nn.graph_view import ONE_DEVICE, SPREAD, CostHints, GraphView, Inputs, ViewTraits
from weft.nn.layers.conv import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv
from weft.nn.layers.decoder import Decoder, DistMult, Dot, EdgeDecoder, LinkModel, make_decoder
from weft.nn.layers.linear_transform import Linear, has_onednn, linear, sum_rows
from weft.nn.layers.norm import BatchNorm, LayerNorm
from weft.nn.layers.phases import parameter_dtype, row_dtype
from weft.nn.layers.pyg_conv import PyGConv, from_pyg
from weft.nn.layers.rgcn import OneHotRGCNConv, RGCNConv
from weft.nn.layers.stack import Decoupled, RowLayer, Stack
from weft.nn.layers.typed_input import (
    Embedding,
    FeatureTables,
    TypedInput,
    embedding_rows,
    embeddings,
    is_embedded,
    shared_parameters,
    typed_rows,
    with_own_rows,
)
from weft.nn.models.light_gcn import LightGCN
from weft.nn.models.model_zoo import (
    EMBEDDING_MODELS,
    FAMILY_OPTIONS,
    GAT,
    GCN,
    GIN,
    MODEL_NAMES,
    MODELS,
    RELATIONAL,
    RGCN,
    SAGE,
    GATv2,
    check_model_name,
    from_options,
    make_model,
)
from weft.nn.models.probe_model import ProbeModel, random_topology, some_vertices
from weft.nn.models.pyg_export import to_pyg
from weft.nn.models.row_independence import check_row_independence, idle_parameters
from weft.nn.view import TypedRows, View
from weft.nn.workload.dense_cost import dense_flops, make_layer_sizes, preparation_memory, step_memory
from weft.nn.workload.flops import DenseFlops
from weft.nn.workload.layer_sizes import BlockSize, LayerSizes, TypedBlockSize
from weft.nn.workload.meta_topology import MetaTopology
from weft.nn.workload.operation import GraphOperation
from weft.nn.workload.outline import RunModel, outline, run_whole
from weft.nn.workload.receptive_field import ReceptiveField
from weft.nn.workload.workload import Outlines, Workload

__all__ = [
    "EMBEDDING_MODELS",
    "FAMILY_OPTIONS",
    "GAT",
    "GCN",
    "GIN",
    "MODELS",
    "MODEL_NAMES",
    "ONE_DEVICE",
    "RELATIONAL",
    "RGCN",
    "SAGE",
    "SLOT_BYTES",
    "SPREAD",
    "Aggregate",
    "Attend",
    "AttendEdges",
    "BatchNorm",
    "BlockSize",
    "ByRelation",
    "Converted",
    "CostHints",
    "Decoder",
    "Decoupled",
    "DenseFlops",
    "DistMult",
    "Dot",
    "EdgeDecoder",
    "EdgeSoftmax",
    "EdgeSubset",
    "Embedding",
    "FeatureTables",
    "GATConv",
    "GATv2",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "GraphOperation",
    "GraphView",
    "Inputs",
    "LaplacianSum",
    "LayerNorm",
    "LayerSizes",
    "LightGCN",
    "Linear",
    "LinkModel",
    "Max",
    "MetaTopology",
    "OneHotRGCNConv",
    "Outlines",
    "OwnRelationRows",
    "ProbeModel",
    "PyGConv",
    "RGCNConv",
    "ReceptiveField",
    "RelationIndex",
    "RelationRows",
    "Request",
    "RowLayer",
    "Rows",
    "RunModel",
    "SAGEConv",
    "Stack",
    "SubTopology",
    "Sum",
    "Topology",
    "Total",
    "TypedBlock",
    "TypedBlockSize",
    "TypedInput",
    "TypedRows",
    "Unconverted",
    "View",
    "ViewTraits",
    "WholeLayer",
    "WorkingSet",
    "Workload",
    "check_model_name",
    "check_row_independence",
    "convert",
    "dense_flops",
    "embedding_rows",
    "embeddings",
    "from_options",
    "from_pyg",
    "has_onednn",
    "idle_parameters",
    "is_embedded",
    "linear",
    "make_decoder",
    "make_layer_sizes",
    "make_model",
    "outline",
    "parameter_dtype",
    "preparation_memory",
    "random_topology",
    "row_dtype",
    "run_whole",
    "shared_parameters",
    "some_vertices",
    "step_memory",
    "sum_rows",
    "to_pyg",
    "typed_rows",
    "with_own_rows",
]
