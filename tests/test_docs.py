"""All code blocks of the documentation run as printed, in the order of each page, but for fewer epochs.

Commands of ```bash blocks run in processes, as a user starts them. ```python blocks of a page share their variables and
run on one rank, or as under torchrun on as many ranks as the page's blocks name. A block with a title is a file. The
files in STAGED exist unless the page creates them, and small graphs stand in for public ones of the same name.
`<!-- not run: WHY -->` above a block leaves it out.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from torch.distributed import TCPStore

import weft
from tests.lib.pages import PAGES, ROOT, RUN, Block, blocks, commands, write_datasets
from tests.lib.running import run_on_ranks, start

EPOCHS = 2
NUM_USERS = 1500  # of which so many train that a batch may be of 1,024
STAGED = ("users.parquet", "follows.parquet", "graphs/mine", "graphs/grown", "graphs/values", "runs/mine")
TRAINING = ("train", "compare", "sweep")
SHOWN = [path for path in PAGES if any(block.language in RUN for block in blocks(path.read_text()))]
NAMES: dict[str, dict[str, Any]] = {}
"""Variables that the Python blocks of a page have defined so far, on this rank, by the page's folder."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the files that pages use: tables, a graph of them, a run on it, and datasets."""
    folder = tmp_path_factory.mktemp("stage")
    write_datasets(folder / "data")
    users, follows = tables()
    parquet.write_table(users, folder / "users.parquet")
    parquet.write_table(follows, folder / "follows.parquet")
    columns = {"id": "user_id", "source": "src", "target": "dst", "features": ["age", "visits", "embedding"]}
    graph = weft.Graph.from_tables(users, follows, label="churned", split="split", **columns)
    for name in ("mine", "grown"):
        graph.save(folder / "graphs" / name)
    weft.Graph.from_tables(users, follows, label="spent", **columns).save(folder / "graphs" / "values")
    weft.train(str(folder / "graphs" / "mine"), out=folder / "runs" / "mine", epochs=EPOCHS, quiet=True)
    return folder


def tables() -> tuple[pyarrow.Table, pyarrow.Table]:
    """Return a table of users and a table of who follows whom."""
    random, num = np.random.default_rng(0), NUM_USERS
    ids = [f"user-{number}" for number in range(num)]
    users = {
        "user_id": ids,
        "age": random.integers(18, 80, num),
        "visits": random.integers(0, 9, num),
        "embedding": list(random.normal(size=(num, 4))),
        "churned": np.arange(num) % 2,
        "spent": random.random(num),
        "split": (["train"] * 8 + ["val", "test"]) * (num // 10),
    }
    ends = random.integers(0, num, (2, 4 * num))
    follows = {"src": [ids[u] for u in ends[0]], "dst": [ids[v] for v in ends[1]], "strength": random.random(4 * num)}
    return pyarrow.table(users), pyarrow.table(follows)


@pytest.mark.slow
@pytest.mark.parametrize("page", SHOWN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_page(page: Path, stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DATA", str(stage / "data"))
    run_page(page, stage, tmp_path)


def run_page(page: Path, stage: Path, folder: Path) -> None:
    """Run a page's blocks in a folder; an AssertionError names page, line and message of a block that fails."""
    shown = [block for block in blocks(page.read_text()) if not block.left_out]
    for staged in STAGED:
        if not any(f"--out {staged}" in block.text for block in shown):
            (folder / staged).parent.mkdir(exist_ok=True)
            (shutil.copytree if (stage / staged).is_dir() else shutil.copy)(stage / staged, folder / staged)
    size = max([1, *(int(number) for block in shown for number in re.findall(r"\bworkers=(\d+)", block.text))])
    for block in shown:
        place = f"{page.name}:{block.line}"
        if block.title:
            (folder / block.title).write_text(block.text)
        elif block.language == "bash":
            for arguments, target in commands(block):
                run_command(shortened(arguments), target, folder, place)
        elif block.language == "python":
            run_on_ranks(size, run_python, block, place, folder, meeting_place().port)


@cache
def meeting_place() -> TCPStore:
    """Return a store through which ranks connect, as torchrun provides it."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def run_command(arguments: list[str], target: str, folder: Path, place: str) -> None:
    process = start(*arguments, prepare=partial(os.chdir, folder))
    out, errors = process.output()
    assert process.returncode == 0, f"{place}: weft {' '.join(arguments)}: {process.returncode}: {errors}"
    if target:
        (folder / target).write_text(out)


def shortened(arguments: list[str]) -> list[str]:
    """Return the arguments with a tenth of their epochs, or `EPOCHS` if they name none, and with small graphs."""
    arguments = [re.sub(r"\b(vertices|edges)=(\d{6,})", one_in_many, argument) for argument in arguments]
    if arguments[0] not in TRAINING:
        return arguments
    if "--epochs" not in arguments:
        return [*arguments, "--epochs", str(EPOCHS)]
    place = arguments.index("--epochs") + 1
    return [*arguments[:place], str(max(1, int(arguments[place]) // 10)), *arguments[place + 1 :]]


def one_in_many(size: re.Match[str]) -> str:
    """Return a size of a graph that is to be generated, divided by a hundred thousand."""
    return f"{size[1]}={int(size[2]) // 100_000}"


def run_python(block: Block, place: str, folder: Path, port: int) -> None:
    """Run a block on a rank, which connects to the others through the store at `port`, as under torchrun."""
    names = NAMES.setdefault(str(folder), {"__name__": "__main__"})
    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    path = patch.object(sys, "path", [str(folder), *sys.path])
    with contextlib.chdir(folder), patch.dict(os.environ, torchrun), path:
        exec(compile("\n" * (block.line - 1) + block.text, place, "exec"), names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```bash\nweft train digitz\n```", "page.md:2: weft train digitz .*did you mean 'digits'"),
        ("```bash\nweft config digits > run.toml\nweft train --config runs.toml\n```", "runs.toml: No such file"),
        ("```bash\npip install weft\n```", "no command of weft alone: pip install weft"),
        ("```python\nimport weft\n\nweft.load('digitz')\n```", "unknown dataset 'digitz'"),
        ("<!-- not run: -->\n```bash\npip install weft\n```", "line 1: say why"),
        ("```bash\nweft train digits", "line 1: a fence that does not end"),
    ],
)
def test_a_broken_block_is_found(text: str, message: str, stage: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises((AssertionError, ValueError), match=message):
        run_page(page, stage, tmp_path)


def test_a_block_that_is_left_out_is_not_run(stage: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- not run: it needs a cluster -->\n```bash\nweft train digitz\n```\n")
    run_page(page, stage, tmp_path)
