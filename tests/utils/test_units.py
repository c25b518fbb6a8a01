"""Amounts of bytes are parsed with their units; other texts are refused."""

from __future__ import annotations

import pytest

from weft.utils.errors import InputError
from weft.utils.units import parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("17B", 17),
        ("512MB", 512 * 10**6),
        ("512mb", 512 * 10**6),
        ("3K", 3000),
        ("3k", 3000),
        ("1KiB", 1024),
        ("1Ki", 1024),
        ("2 MiB", 2 << 20),
        (" 1.5 GiB\n", 3 << 29),
        ("0.5G", 5 * 10**8),
        ("2TB", 2 * 10**12),
        ("1.9", 1),
    ],
)
def test_values(text: str, num_bytes: int) -> None:
    assert parse_bytes(text, "--cache-memory") == num_bytes


@pytest.mark.parametrize(
    "text", ["", "B", "MB", "-1", "-1MB", "1e9", "1,5GB", "1.GB", ".5GB", "1PB", "5i", "5iB", "1 M B", "1MBs"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_bytes(text, "--cache-memory")
    assert str(caught.value) == f"--cache-memory {text!r}: give an amount such as 512MB or 1.5GiB"
