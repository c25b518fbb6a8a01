"""What gloo writes by itself stays away from standard error while ranks connect; what Python writes does not."""

from __future__ import annotations

import os
import sys

import pytest

from weft.comm.connecting import without_gloo_lines


def test_lines_of_libraries_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    with without_gloo_lines():
        os.write(2, b"of a library\n")
        print("of ours", file=sys.stderr)
    os.write(2, b"afterwards\n")
    print("and of ours", file=sys.stderr)
    assert capfd.readouterr().err == "of ours\nafterwards\nand of ours\n"
