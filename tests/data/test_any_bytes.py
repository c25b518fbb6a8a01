"""Reading a file of any bytes gives its content or an InputError of one line, in a bounded time."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.profiles import profile
from tests.lib.small_files import QUICK, THOROUGH, assert_graph_or_one_line, graph, write_npz, write_typed_npz
from weft.config.config import Config
from weft.cost import Profile
from weft.data import load
from weft.partition import PartitionBook, make_book
from weft.runtime.kernel_selection import DEFAULT, KernelSelection
from weft.training.artifacts import checkpoint
from weft.utils.errors import InputError
from weft.utils.files import jsonl

pytestmark = pytest.mark.filterwarnings("ignore::weft.data.DataWarning")

TEXT = b"# edges\nsource,target,weight\n0,1,0.5\n2,1,-1e3\n\n1,2,7\n"


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A kind of file: how to write a valid one, which of its files to damage, and how to read it."""

    name: str
    write: Callable[[Path], object]
    damaged_file: str = ""
    read: Callable[[Path], object] = load


def write_record(path: Path) -> None:
    """Write the records of two epochs."""
    recorder = jsonl.Recorder(path)
    for epoch in range(2):
        recorder.write("epoch", epoch=epoch, loss=0.5, seconds=0.25)
    recorder.close()


def write_checkpoint(folder: Path) -> None:
    """Write a checkpoint of a model with one parameter."""
    state = checkpoint.Checkpoint(
        config=Config(), fingerprint="", progress=checkpoint.Progress(), tensors={"model.weight": torch.ones(2)}
    )
    checkpoint.save(folder, state)


READERS = {
    "text": Reader(name="g.csv", write=lambda path: path.write_bytes(TEXT)),
    "gzip": Reader(name="g.txt.gz", write=lambda path: path.write_bytes(gzip.compress(TEXT, mtime=0))),
    "npy": Reader(name="g.npy", write=lambda path: np.save(path, np.array([[0, 1, 2], [1, 2, 1]]))),
    "npz": Reader(name="g.npz", write=write_npz),
    "typed npz": Reader(name="g.npz", write=write_typed_npz),
    "manifest": Reader(name="store", write=lambda path: graph().save(path), damaged_file="manifest.json"),
    "book": Reader(
        name="book",
        write=lambda path: make_book(graph(), 2, method="range").save(path),
        read=lambda path: PartitionBook.open(path, graph()),
    ),
    "configuration": Reader(name="run.toml", write=lambda path: path.write_text(Config().to_toml()), read=Config.read),
    "kernel selection": Reader(
        name="choices.json", write=lambda path: path.write_text(DEFAULT.text()), read=KernelSelection.read
    ),
    "profile": Reader(name="machine.json", write=lambda path: profile().save(path), read=Profile.read),
    "record": Reader(name="metrics.jsonl", write=write_record, read=jsonl.read),
    **{
        f"checkpoint's {name}": Reader(
            name="checkpoints", write=write_checkpoint, damaged_file=f"epoch-00000000/{name}", read=checkpoint.newest
        )
        for name in ("state.json", "state.safetensors")
    },
    **{
        f"store's {key}": Reader(name="store", write=lambda path: graph().save(path), damaged_file=f"{key}.npy")
        for key in ("indptr", "indices", "weight", "transpose_edge_ids", "edge_type", "x", "y", "train_mask")
    },
}


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Sample any bytes, or the bytes of a file with some changed, removed or doubled."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        part = slice(start, start + draw(st.sampled_from([1, 1, 4, 8, 64, 1 << 20])))
        change = draw(st.sampled_from(["bit", "bytes", "cut", "double"]))
        if change == "bit" and start < len(data):
            data[start] ^= 1 << draw(st.integers(0, 7))
        elif change == "bytes":
            data[part] = draw(
                st.sampled_from([b"0", b"9" * 20, b"-", b"\xff" * 8, b"\n", b"[", b"{", b'"', b"nan", b" "])
            )
        else:
            data[part] = b"" if change == "cut" else data[part] * 2
    return bytes(data)


def try_damaged_files(reader: Reader, folder: Path, trials: settings) -> None:
    """Read a file in many damaged states."""
    path = folder / reader.name
    reader.write(path)
    reader.read(path)
    file = path / reader.damaged_file if reader.damaged_file else path
    content = file.read_bytes()

    @trials
    @given(content=damaged(content))
    def try_bytes(content: bytes) -> None:
        file.write_bytes(content)
        assert_graph_or_one_line(lambda: reader.read(path))

    try_bytes()


@pytest.mark.parametrize("kind", READERS)
def test_any_bytes(kind: str, tmp_path: Path) -> None:
    try_damaged_files(READERS[kind], tmp_path, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", READERS)
def test_any_bytes_thoroughly(kind: str, tmp_path: Path) -> None:
    try_damaged_files(READERS[kind], tmp_path, THOROUGH)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", READERS)
def test_a_fifo_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    reader = READERS[kind]
    path = tmp_path / reader.name
    reader.write(path)
    file = path / reader.damaged_file if reader.damaged_file else path
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InputError, match=r"is a FIFO, which weft does not read|: missing|all checkpoints are damaged"):
        reader.read(path)
