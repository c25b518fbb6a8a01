"""Models written for PyG, unchanged, as models over views.

    layers      what a convolution of PyG does in weft's aggregates
    trace       a model's forward, with its convolutions as calls over the graph; steps: what its calls come to
    typed       rows and edges by type, in dicts, as those of one graph
    program     those steps, and what is alive between them
    model       runs them as phases under views

`convert` is the door.
"""

from weft.nn.convert.convert import convert as convert
from weft.nn.convert.convert import is_pyg as is_pyg
from weft.nn.convert.hetero import RowsByType as RowsByType
from weft.nn.convert.hetero import takes_types as takes_types
from weft.nn.convert.traced_model import Converted as Converted
