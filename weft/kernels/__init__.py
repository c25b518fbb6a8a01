"""Differentiable kernels on CPU and GPU: sums, maxima and attention over in-edges, and keyed dropout."""

from weft.kernels.backend import Attention as Attention
from weft.kernels.backend import AttentionInputs as AttentionInputs
from weft.kernels.backend import EdgeDropout as EdgeDropout
from weft.kernels.backend import EdgeFeatures as EdgeFeatures
from weft.kernels.backend import Scale as Scale
from weft.kernels.backend import SourceGrads as SourceGrads
from weft.kernels.ops import NO_TRITON as NO_TRITON
from weft.kernels.ops import attend as attend
from weft.kernels.ops import attend_and_save as attend_and_save
from weft.kernels.ops import attend_backward as attend_backward
from weft.kernels.ops import attend_edges as attend_edges
from weft.kernels.ops import dot_logits as dot_logits
from weft.kernels.ops import keyed_dropout as keyed_dropout
from weft.kernels.ops import pair_logits as pair_logits
from weft.kernels.ops import spmm as spmm
from weft.kernels.ops import spmm_max as spmm_max
from weft.kernels.ops import spmm_max_positions as spmm_max_positions
from weft.kernels.ops import spmm_transposed as spmm_transposed
from weft.kernels.ops import sum_backends as sum_backends
from weft.kernels.ops import triton_backend as triton_backend
