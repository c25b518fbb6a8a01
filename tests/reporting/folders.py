"""Folders of runs that never ran, and what a report's page holds."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from weft.config.config import Config
from weft.utils.jsonl import Recorder

Line = dict[str, Any]


def make_run(
    folder: Path, *, epochs: int = 3, ranks: int = 2, ended: bool = True, scale: float = 1.0, **config: Any
) -> Path:
    """A run as `weft train` leaves it: every number is another one, so that none can stand for another."""
    folder.mkdir(parents=True)
    given = Config(**{"graph": "digits", "strategy": "tensor", "workers": ranks, "epochs": epochs, **config})
    (folder / "config.toml").write_text(given.to_toml())
    recorder = Recorder(folder / "metrics.jsonl")
    recorder.write(
        "config",
        epoch=0,
        config={},
        graph={"vertices": 8, "edges": 12, "fingerprint": "f" * 64},
        num_parameters=20,
        placement=[{"planned": {"bytes_sent": {"halo": 100 + rank}}} for rank in range(ranks)],
        ranks=ranks,
        degrees=[1, 4, 3],
    )
    for epoch in range(epochs):
        made = scale / (1 + epoch)
        recorder.write("epoch", epoch=epoch, loss=made, lr=0.01, seconds=made / 8, val_accuracy=1 - made / 2)
        for rank in range(ranks):
            recorder.write("rank", **rank_line(epoch, rank))
    if ended:
        recorder.write("summary", epochs=epochs, best_epoch=epochs - 1, loss=1.0, val_accuracy=0.5, ranks=[])
    recorder.close()
    return folder


def rank_line(epoch: int, rank: int) -> Line:
    """What a rank did in an epoch's training."""
    return {
        "epoch": epoch,
        "rank": rank,
        "phase": "train",
        "compute_seconds": 0.1 + rank + epoch / 16,
        "communication_seconds": 0.2 + rank + epoch / 16,
        "waiting_seconds": 0.3 + rank + epoch / 16,
        "peak_memory_bytes": 1000 * (rank + 1) + epoch,
        "collectives": {"halo": 2},
        "bytes_sent": {"halo": 100 + rank},
        "bytes_received": {"halo": 100 + rank},
        "edges": 50 + rank,
        "stages": {"encode": 0.01 * (rank + 1)},
    }


class Elements(HTMLParser):
    """The elements of a page: their names and attributes, and the text of scripts by id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self._figure = self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.found.append((tag, known))
        if tag == "figure":
            self._figure = str(known["id"])
        self._inside = str(known.get("id", self._figure)) if tag == "script" else ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "figure":
            self._figure = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[self._inside] = data
            self._inside = ""

    def of(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all elements of a name."""
        return [known for name, known in self.found if name == tag]


def tables(page: str) -> dict[str, list[Line]]:
    """The data of a page's figures by name, row by row."""
    found = json.loads(Elements(page).scripts["records"])
    return {name: [row for group in groups for row in rows(group)] for name, groups in found.items()}


def rows(group: Line) -> list[Line]:
    """Those of one group."""
    columns = group["columns"]
    return [group["shared"] | dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def text(page: str) -> str:
    """What a person reads of a page."""
    body = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))
