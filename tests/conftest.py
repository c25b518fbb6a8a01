"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def weft_data() -> Callable[[str], Path]:
    """Finds a real graph's file in the folder that WEFT_DATA names; skips the test where it is not there."""

    def find(name: str) -> Path:
        folder = os.environ.get("WEFT_DATA")
        if not folder or not (Path(folder) / f"{name}.npz").is_file():
            pytest.skip(f"WEFT_DATA holds no {name}.npz")
        return Path(folder) / f"{name}.npz"

    return find
