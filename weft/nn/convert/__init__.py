"""Conversion of unchanged PyG models to models over views; `convert` is the entry point.

convert          checks a model, traces it for training and for evaluation, and replaces its modules
tracing          runs the forward on torch.fx proxies; convolutions become steps over the graph
native_layers    rules that express PyG's convolutions by weft's aggregates
hetero           models on heterogeneous graphs: rows and edges by type, in dicts
fx_calls         turns torch.fx nodes into steps
traced_steps     the steps, and the values that are live between them
traced_model     runs the steps in phases, under views
comparison       runs the original and the converted model side by side
random_graph     the graphs for this
comparison_view  the views of the converted model for this
unconverted      runs the original as it is, under `single`
source_location  the line of the user's code that an error names
"""

from weft.nn.convert.convert import convert as convert
from weft.nn.convert.convert import is_pyg as is_pyg
from weft.nn.convert.convert import unwrapped as unwrapped
from weft.nn.convert.hetero import takes_types as takes_types
from weft.nn.convert.traced_model import Converted as Converted
from weft.nn.convert.tracing import parameters_of as parameters_of
from weft.nn.convert.typed_steps import RowsByType as RowsByType
from weft.nn.convert.unconverted import Unconverted as Unconverted
