"""What ranks have beside imports: PyG writes and compiles a convolution's code where the first of a kind is made."""

from __future__ import annotations

import torch

from tests.lib.cases import pyg_cases

threads = torch.get_num_threads()
torch.set_num_threads(1)  # a process that is forked later hangs on threads which it does not have
for case in pyg_cases():
    case.build()
torch.set_num_threads(threads)
