"""Base class for modes that observe every PyTorch operation."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """TorchDispatchMode without PyTorch's guard for torch.compile.

    The guard imports the compiler at the first operation, which costs two seconds and 150 MB in each process.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
