"""What sees PyTorch's operations as they run."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A TorchDispatchMode that PyTorch does not guard against its compiler.

    For that it imports the compiler at the first operation: two seconds and 150 MB in each process.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
