"""Parse the code blocks of the documentation's pages, and write small graphs in place of the datasets they use."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *(ROOT / "docs").rglob("*.md")],
    key=lambda path: path.relative_to(ROOT).as_posix(),
)
RUN = ("bash", "python")
FENCE = re.compile(r"( *)```(\w*) *(?:title=\"([^\"]+)\")?$")
LEFT_OUT = re.compile(r"<!-- not run: *(.*?) *-->$")
NUM_VERTICES = 60


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    line: int
    """Number of its first line of text, from 1."""
    language: str
    title: str
    """Name of the file to write the block to, '' for none."""
    text: str
    left_out: bool
    """True if a comment above the block says that it is not run, and why."""


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page in order; ValueError if one does not end or is left out without a reason."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opened = FENCE.match(lines[number])
        number += 1
        if opened is None:
            continue
        indent, language, title = opened.groups()
        first = number
        while number < len(lines) and lines[number].strip() != "```":
            number += 1
        if number == len(lines):
            raise ValueError(f"line {first}: a fence that does not end")
        above = LEFT_OUT.match(lines[first - 2].strip()) if first > 1 else None
        if above and not above[1]:
            raise ValueError(f"line {first - 1}: say why the block is not run")
        yield Block(
            line=first + 1,
            language=language,
            title=title or "",
            text="".join(f"{line.removeprefix(indent)}\n" for line in lines[first:number]),
            left_out=above is not None,
        )
        number += 1


def commands(block: Block) -> Iterator[tuple[list[str], str]]:
    """Yield the commands of a shell block: arguments of `weft`, and the file for its output ('' for none).

    Anything other than a command of weft is a ValueError.
    """
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        *words, target = (words[:-2] + words[-1:]) if len(words) > 2 and words[-2] == ">" else [*words, ""]
        if words[0] != "weft" or {"|", "&&", ">", ";"} & set(words):
            raise ValueError(f"no command of weft alone: {line.strip()}: put '<!-- not run: WHY -->' above the block")
        yield words[1:], target


def write_datasets(folder: Path) -> None:
    """Write small graphs with the names and kinds of public ones to `folder`, for WEFT_DATA."""
    random = np.random.default_rng(0)
    folder.mkdir()
    edges = random.integers(0, NUM_VERTICES, (2, 6 * NUM_VERTICES))
    masks = {f"{part}_mask": np.arange(NUM_VERTICES) % 3 == n for n, part in enumerate(("train", "val", "test"))}
    features = random.normal(size=(NUM_VERTICES, 16)).astype(np.float32)
    labelled = {"edge_index": edges, "y": np.arange(NUM_VERTICES) % 4, **masks}
    relations = {"edge_type": np.arange(len(edges[0])) % 3, "num_relations": np.array(3)}
    held_out = {
        name: np.stack([*random.integers(0, NUM_VERTICES, (2, 9)), np.arange(9) % 3])[[0, 2, 1]].T
        for name in ("valid_triples", "test_triples")
    }
    np.savez(folder / "cora.npz", x=features, **labelled)
    buys = np.unique(np.stack([edges[0], edges[1] % 30]), axis=1)
    buys = buys[:, random.permutation(buys.shape[1])]
    np.savez(
        folder / "bipartite_amazon-book.npz",
        **{
            "node_types": np.array(["user", "item"]),
            "num_nodes": np.array([NUM_VERTICES, 30]),
            "edge_types": np.array(["user|buys|item"]),
            "edge_index|user|buys|item": buys[:, 50:],
            "test_edge_index": buys[:, :50],
        },
    )
    np.savez(folder / "rdf_aifb.npz", **labelled, **relations)
    np.savez(folder / "kg_wn18rr.npz", edge_index=edges, num_nodes=np.array(NUM_VERTICES), **relations, **held_out)
    np.savez(
        folder / "hetero_acm.npz",
        **{
            "node_types": np.array(["paper", "author"]),
            "num_nodes": np.array([NUM_VERTICES, 20]),
            "edge_types": np.array(["paper|written_by|author", "author|writes|paper"]),
            "edge_index|paper|written_by|author": np.stack([edges[0], edges[1] % 20]),
            "edge_index|author|writes|paper": np.stack([edges[1] % 20, edges[0]]),
            "x|paper": features,
            "y": labelled["y"],
            "target_type": np.array("paper"),
            **masks,
        },
    )
