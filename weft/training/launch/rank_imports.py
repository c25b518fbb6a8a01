"""Imports that local ranks need. Only the process from which they are forked imports this module, once for all."""

import torch._dynamo  # noqa: F401  # imported by PyTorch when the first optimizer is created

import weft.training  # noqa: F401
