"""What ranks have beside imports: PyG writes and compiles a convolution's code where the first of a kind is made."""

from __future__ import annotations

from tests.strategies.cases import pyg_cases

for case in pyg_cases():
    case.build()
