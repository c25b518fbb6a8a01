"""Output that cannot be written is discarded: it is never a reason to stop training."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from weft.training.progress import ProgressShow
from weft.utils.log import LOGGER
from weft.utils.standard_streams import LossyStream, lossy
from weft.utils.terminal import is_terminal, print_line

FULL = Path("/dev/full")
"""Device without space for a single byte (Linux)."""


def without_reader() -> io.TextIOWrapper:
    """Return the end of a pipe whose reader has ended."""
    reading, writing = os.pipe()
    os.close(reading)
    return open(writing, "w", buffering=1)


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("kind", ["full", "pipe", "closed", "none"])
def test_what_cannot_be_written_is_discarded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "full" and not FULL.exists():
        pytest.skip("there is no /dev/full")
    stream = {
        "full": lambda: FULL.open("w", buffering=1),
        "pipe": without_reader,
        "closed": closed,
        "none": lambda: None,
    }[kind]()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        print_line("text")
        LOGGER.info("text")
        assert not is_terminal(sys.stderr)
        with ProgressShow(0, 1, quiet=False) as show:
            show.say("text")
            show.epoch(0, 0.5, {}, 10)
        patch.setattr(sys, "stdout", lossy(stream))
        print("text", flush=True)
        Console().print("text")
        stdout = sys.stdout
        assert isinstance(stdout, LossyStream)
        assert (stdout.error is not None) == (kind in ("full", "pipe"))
        stdout.close()


def test_nothing_goes_to_standard_output_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`print` would write to standard output where there is no standard error."""
    monkeypatch.setattr(sys, "stderr", None)
    LOGGER.info("text")
    with ProgressShow(0, 1, quiet=False) as show:
        show.epoch(0, 0.5, {}, 10)
    assert capsys.readouterr().out == ""


def test_characters_that_the_encoding_lacks_are_escaped() -> None:
    file = io.BytesIO()
    stream = lossy(io.TextIOWrapper(file, encoding="ascii"))
    assert stream.write("grün") == len("grün")
    stream.flush()
    assert file.getvalue() == b"gr\\xfcn"


def test_an_error_of_the_caller_is_not_discarded() -> None:
    with pytest.raises(TypeError):
        lossy(io.StringIO()).write(3)  # type: ignore[arg-type]
    assert lossy(stream := lossy(io.StringIO())) is stream
