"""The factors of a probe survive their file, and a file that holds none is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.graph_checks import assert_one_line
from weft.cost import Machine
from weft.utils.errors import InputError

FACTORS = Machine(seconds_per_flop=1.25e-10, seconds_per_edge=0.0, seconds_per_byte=1 / 3)


def test_survive_their_file(tmp_path: Path) -> None:
    FACTORS.save(tmp_path / "probe.json")
    assert Machine.read(tmp_path / "probe.json") == FACTORS


def test_what_else_the_file_says_is_left_alone(tmp_path: Path) -> None:
    """Whole numbers will do, as a person may write them."""
    path = tmp_path / "probe.json"
    path.write_text('{"host": "a", "seconds_per_flop": 1, "seconds_per_edge": 2, "seconds_per_byte": 0}')
    assert Machine.read(path) == Machine(seconds_per_flop=1, seconds_per_edge=2, seconds_per_byte=0)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("{", "", "JSONDecodeError"),
        ("0.0", "null", "TypeError"),
        ("0.0", '"fast"', "'fast'"),
        ("seconds_per_edge", "seconds_per_edges", "KeyError: 'seconds_per_edge'"),
        ("0.0", "-1e-9", "seconds_per_edge is -1e-09, not a number of at least 0"),
        ("0.0", "NaN", "seconds_per_edge is nan, not a number of at least 0"),
        ("0.0", "1e999", "seconds_per_edge is inf, not a number of at least 0"),
    ],
)
def test_refuses(tmp_path: Path, before: str, after: str, reason: str) -> None:
    path = tmp_path / "probe.json"
    FACTORS.save(path)
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(InputError) as caught:
        Machine.read(path)
    assert_one_line(caught, reason, "give the probe.json of a hybrid run, or a profile")
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("content", [b"", b"[1, 2, 3]", b"[" * 100_000, b"\xff\xfe\x00"])
def test_refuses_what_is_no_probe(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "probe.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"cannot be read.*give the probe.json"):
        Machine.read(path)
