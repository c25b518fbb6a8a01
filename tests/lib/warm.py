"""Build the graphs and models of the quick cases once, in the process that all ranks are forked from."""

from __future__ import annotations

import torch

from tests.lib.matrix import quick
from tests.lib.ranks import keep_digits, never_wait_for_the_disk
from tests.lib.session import built
from weft.data.io.datasets import BUILT_IN

keep_digits()
never_wait_for_the_disk()
num_threads = torch.get_num_threads()
torch.set_num_threads(1)  # a process that is forked later would wait for threads that it does not have
for case in {point.case for point in quick().values()}:
    if not case.without:
        built(case)
BUILT_IN["digits"]()
torch.set_num_threads(num_threads)
