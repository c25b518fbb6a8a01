"""Message functions of PyG convolutions as programs that run in tiles of edges, without a row for each edge in memory.

Reading order: tiled_conv (which calls of a convolution are replaced), structure (which convolutions share programs),
messages (what happens in a call), trace (a message function as a graph of ATen operations), parts (what runs on
vertices before and after the edges), operations, values and aten_operations (the graph as a list of operations),
program (its run on all edges, by csrc/messages.h), comparison (a program next to its function). in_edge_sums: what a
convolution computes on edges before its messages, such as degrees.
"""

from weft.nn.messages.in_edge_sums import TRIAL_ERRORS, InEdgeSums, as_matrix
from weft.nn.messages.structure import structure_of
from weft.nn.messages.tiled_conv import TiledConv

__all__ = ["TRIAL_ERRORS", "InEdgeSums", "TiledConv", "as_matrix", "structure_of"]
