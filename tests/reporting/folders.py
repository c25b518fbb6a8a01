"""Folders of fictitious runs, and readers of a report page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from weft.config.config import Config
from weft.utils.files.jsonl import Recorder

Line = dict[str, Any]


def make_run(
    folder: Path, *, epochs: int = 3, ranks: int = 2, ended: bool = True, scale: float = 1.0, **config: Any
) -> Path:
    """Write a run folder as `weft train` does. All numbers differ, so that no number can be mistaken for another."""
    folder.mkdir(parents=True)
    options = Config(**{"graph": "digits", "strategy": "tensor", "workers": ranks, "epochs": epochs, **config})
    (folder / "config.toml").write_text(options.to_toml())
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
        loss = scale / (1 + epoch)
        recorder.write("epoch", epoch=epoch, loss=loss, lr=0.01, seconds=loss / 8, val_accuracy=1 - loss / 2)
        for rank in range(ranks):
            recorder.write("rank", **rank_line(epoch, rank))
    if ended:
        recorder.write("summary", epochs=epochs, best_epoch=epochs - 1, loss=loss, val_accuracy=1 - loss / 2, ranks=[])
    recorder.close()
    return folder


def rank_line(epoch: int, rank: int) -> Line:
    """Return the record of a rank's training in an epoch."""
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
    """Elements of a page with their names and attributes, and the text of scripts by id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self._figure = self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag == "figure":
            self._figure = str(attributes["id"])
        self._inside = str(attributes.get("id", self._figure)) if tag == "script" else ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "figure":
            self._figure = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[self._inside] = data
            self._inside = ""

    def of(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements with a name."""
        return [attributes for name, attributes in self.elements if name == tag]


def tables(page: str) -> dict[str, list[Line]]:
    """Return the data of the figures of a page, by name, as rows."""
    figures = json.loads(Elements(page).scripts["records"])
    return {name: [row for group in groups for row in rows(group)] for name, groups in figures.items()}


def rows(group: Line) -> list[Line]:
    """Return the rows of a group of records."""
    columns = group["columns"]
    return [group["shared"] | dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def text(page: str) -> str:
    """Return the visible text of a page."""
    body = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))
