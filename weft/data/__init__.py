"""Graphs: what they are, where they come from, and how they are kept."""

from weft.data.adjacency import Adjacency as Adjacency
from weft.data.adjacency import Transpose as Transpose
from weft.data.checks import DataWarning as DataWarning
from weft.data.datasets import as_asked as as_asked
from weft.data.datasets import load as load
from weft.data.datasets import read_edges as read_edges
from weft.data.described import DescribedGraph as DescribedGraph
from weft.data.described import is_described as is_described
from weft.data.graph import Graph as Graph
from weft.data.graph import open_store as open_store
from weft.data.inverse import forward_relations as forward_relations
from weft.data.inverse import with_inverse_relations as with_inverse_relations
from weft.data.io.store import is_symmetric as is_symmetric
from weft.data.io.store import save as save
from weft.data.links import Links as Links
from weft.data.links import negative_key as negative_key
from weft.data.links import require_links as require_links
from weft.data.links import with_held_out_links as with_held_out_links
from weft.data.names import VertexNames as VertexNames
from weft.data.order import reorder as reorder
from weft.data.rules import require_trainable as require_trainable
from weft.data.shape import GraphShape as GraphShape
from weft.data.stats import GraphStats as GraphStats
from weft.data.stats import degree_counts as degree_counts
from weft.data.typed import UNTYPED as UNTYPED
from weft.data.typed import TypedShape as TypedShape
