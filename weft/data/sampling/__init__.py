"""Mini-batches: the examples of a batch, sampling of in-edges, and relabelling of the sampled vertices.

All random choices are keyed by their purpose, so a sample is the same on any number of ranks and threads.
"""

from weft.data.sampling.batches import DRAW as DRAW
from weft.data.sampling.batches import epoch_batches as epoch_batches
from weft.data.sampling.batches import layer_key as layer_key
from weft.data.sampling.draw import METHODS as METHODS
from weft.data.sampling.draw import KeyTransition as KeyTransition
from weft.data.sampling.draw import SampledEdges as SampledEdges
from weft.data.sampling.draw import dependent_batch_key as dependent_batch_key
from weft.data.sampling.draw import sample_layer as sample_layer
from weft.data.sampling.fanouts import ALL as ALL
from weft.data.sampling.fanouts import Fanout as Fanout
from weft.data.sampling.fanouts import check_fanouts as check_fanouts
from weft.data.sampling.fanouts import format_fanouts as format_fanouts
from weft.data.sampling.fanouts import parse_fanouts as parse_fanouts
from weft.data.sampling.fanouts import takes_all as takes_all
from weft.data.sampling.relabel import Relabeller as Relabeller
