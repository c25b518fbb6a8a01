"""What local ranks have from the start: imported by the process that they are forked from, and by nothing else."""

import torch._dynamo  # noqa: F401  # which PyTorch's optimisers import when the first is made

import weft.training  # noqa: F401
