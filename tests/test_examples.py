"""The examples run unchanged on two ranks."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest

from tests.lib.running import run_on_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(path: Path, folder: Path) -> None:
    """Run an example on a rank, as torchrun does; each rank draws its random numbers separately."""
    os.chdir(folder)
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example(name: str, tmp_path: Path) -> None:
    output = run_on_ranks(2, run_example, EXAMPLES / name, tmp_path)
    figures = [float(figure) for figure in re.findall(r"0\.\d+", output.out)]
    assert figures
    assert min(figures) > 0.5
    if name == "from_pyg.py":
        assert figures[0] == figures[1]
