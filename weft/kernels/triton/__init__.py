"""The backend for GPUs: Triton kernels. Forward and backward are reproducible, since no kernel uses atomic additions.

Rows are distributed over programs by their number of entries (`weft/data/degrees.py`): several small rows share a
program, a middle row has a program, and a large row (hub) is cut into pieces, whose sums a second launch adds up in
their order. With TRITON_INTERPRET=1, Triton's interpreter runs the same kernels on CPU tensors, for tests.
"""

from weft.kernels.triton.additive_attention import attend as attend
from weft.kernels.triton.additive_attention import attend_backward as attend_backward
from weft.kernels.triton.dropout import keyed_dropout as keyed_dropout
from weft.kernels.triton.dropout import relu_dropout_backward as relu_dropout_backward
from weft.kernels.triton.edge_attention import attend_edges as attend_edges
from weft.kernels.triton.edge_attention import attend_edges_backward as attend_edges_backward
from weft.kernels.triton.edge_attention import dot_backward as dot_backward
from weft.kernels.triton.edge_attention import dot_logits as dot_logits
from weft.kernels.triton.edge_attention import pair_backward as pair_backward
from weft.kernels.triton.edge_attention import pair_logits as pair_logits
from weft.kernels.triton.row_copy import add_rows as add_rows
from weft.kernels.triton.row_copy import gather_rows as gather_rows
from weft.kernels.triton.sums import spmm as spmm
from weft.kernels.triton.sums import spmm_max as spmm_max
from weft.kernels.triton.sums import spmm_max_backward as spmm_max_backward
from weft.kernels.triton.sums import spmm_transposed as spmm_transposed
