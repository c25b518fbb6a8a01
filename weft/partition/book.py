"""`PartitionBook`: a partition of one graph's vertices, stored in a file and bound to that graph by its fingerprint."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.config.config import PartitionOptions
from weft.data import Graph
from weft.data.store.npy import map_tensor
from weft.partition.assign import METHODS, Method
from weft.partition.quality import Quality
from weft.utils.entry_points import load_entry_point
from weft.utils.errors import InputError, readable, unknown
from weft.utils.files import migrate
from weft.utils.files.file_writing import new_file
from weft.utils.files.tensor_file import open_tensors, save_tensors

FORMAT = "weft-book"
REMEDY = "make it again with 'weft partition'"


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionBook:
    """The part of every vertex. Empty parts are legal."""

    part: Tensor
    """int32 [N]: part of each vertex, within [0, num_parts)."""
    num_parts: int
    """Number of parts."""
    method: str
    """Name of the partition method."""
    fingerprint: str
    """Fingerprint of the graph."""
    quality: Quality
    """Balance and cut of the partition."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the method by name."""

    @classmethod
    def of(cls, graph: Graph, part: Any, num_parts: int | None = None) -> PartitionBook:
        """Return the book of a partition that you have computed yourself.

        Args:
            graph: The graph.
            part: Part of each vertex, whole numbers [N]: a tensor, an array or a list.
            num_parts: Number of parts. Default: the largest part + 1.

        Raises:
            InputError: The parts are no whole numbers, or too few, too many or outside of the number of parts.
        """
        start = time.perf_counter()
        values = torch.as_tensor(part)
        shape, kind = list(values.shape), str(values.dtype).removeprefix("torch.")
        if shape != [graph.num_vertices] or values.is_floating_point() or values.is_complex() or kind == "bool":
            raise InputError(
                f"part: {kind} {shape} is no partition of {graph.name}: give a whole number for each of its "
                f"{graph.num_vertices:,} vertices"
            )
        least, most = (int(values.min()), int(values.max())) if len(values) else (0, 0)
        num_parts = most + 1 if num_parts is None else num_parts
        if least < 0 or most >= num_parts:
            raise InputError(f"part: the parts are {least} to {most}: give numbers from 0 to {num_parts - 1}")
        parts = values.to(torch.int32)
        return cls(
            part=parts,
            num_parts=num_parts,
            method="custom",
            fingerprint=graph.fingerprint,
            quality=Quality.measure(graph, parts, num_parts, time.perf_counter() - start),
        )

    def members(self, part: int) -> Tensor:
        """Return the vertices of one part, int64, ascending."""
        return (self.part == part).nonzero()[:, 0]

    def save(self, path: str | Path) -> None:
        """Write the book as one safetensors file, completely or not at all. Replaces an existing book.

        Raises:
            InputError: If `path` exists and is no book.
        """
        path = Path(path).absolute()
        require_writable(path)
        about = json.dumps(
            {
                "num_parts": self.num_parts,
                "method": self.method,
                "options": self.options,
                "fingerprint": self.fingerprint,
                "quality": self.quality.record(),
            }
        )
        version = str(migrate.VERSIONS["book"])
        metadata = {"format": FORMAT, "version": version, "about": about, "sha256": checksum(about, self.part)}
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path, flush=True) as draft:
            save_tensors({"part": self.part}, draft, metadata)

    @classmethod
    def open(cls, path: str | Path, graph: Graph) -> PartitionBook:
        """Return the book in a file.

        Args:
            path: The file.
            graph: The graph that it partitions.

        Raises:
            InputError: If it is damaged, of a later version, no book, or a book of another graph.
        """
        path = Path(path)
        if path.is_dir() or not path.exists():
            raise InputError(f"{path}: no such file: check the path, or make a book with 'weft partition'")
        with readable(path, REMEDY):
            metadata, part = read(path)
            if metadata.get("format") != FORMAT:
                raise InputError(f"{path}: is no partition book: give a file written by 'weft partition'")
            metadata = migrate.book(metadata, path)
            if metadata.get("sha256") != checksum(metadata.get("about", ""), part):
                raise InputError(f"{path}: is damaged, since its checksum differs: {REMEDY}")
            about = json.loads(metadata["about"])
            book = cls(part=part, **about | {"quality": Quality.from_record(about["quality"])})
            if book.fingerprint != graph.fingerprint:
                raise InputError(
                    f"{path}: divides another graph than {graph.name} (fingerprint {str(book.fingerprint)[:12]}, not "
                    f"{graph.fingerprint[:12]}): give the graph of the book, in the same --order, or {REMEDY}"
                )
            book.require_parts(graph.num_vertices)
        return book

    def require_parts(self, num_vertices: int) -> None:
        """Raise ValueError unless each of `num_vertices` vertices has a valid part."""
        part = self.part
        if part.dtype != torch.int32 or part.shape != (num_vertices,):
            raise ValueError(f"'part' is {part.dtype} of shape {list(part.shape)}, not int32 of [{num_vertices}]")
        if not isinstance(self.num_parts, int):
            raise ValueError(f"'num_parts' is {self.num_parts!r}, no whole number")
        if num_vertices and not 0 <= int(part.min()) <= int(part.max()) < self.num_parts:
            raise ValueError(f"'part' goes from {int(part.min())} to {int(part.max())} in {self.num_parts} parts")


def make_book(
    graph: Graph, num_parts: int, *, method: str = "metis", options: PartitionOptions | None = None
) -> PartitionBook:
    """Partition a graph's vertices; docs/partition.md describes the methods.

    Args:
        graph: The graph.
        num_parts: Number of parts.
        method: Name of a method in METHODS.
        options: Options of the method.

    Raises:
        InputError: For an unknown method, fewer than one part, or more parts than vertices.
    """
    partition = find_method(method)
    if partition is None:
        raise unknown("method", method, METHODS)
    if not 1 <= num_parts <= graph.num_vertices:
        raise InputError(
            f"--parts {num_parts}: {graph.name} has {graph.num_vertices} vertices: give 1 to {graph.num_vertices} parts"
        )
    options = options or PartitionOptions()
    start = time.perf_counter()
    part = partition(graph, num_parts, options)
    return PartitionBook(
        part=part,
        num_parts=num_parts,
        method=method,
        options=asdict(options),
        fingerprint=graph.fingerprint,
        quality=Quality.measure(graph, part, num_parts, time.perf_counter() - start),
    )


def array_book(path: Path, num_parts: int, graph: Graph) -> PartitionBook:
    """Return the partition in an .npy file, which has the part of each vertex by its original id, [N].

    Args:
        path: The file.
        num_parts: Number of parts.
        graph: The graph.

    Raises:
        InputError: The file cannot be read, or is no partition of the graph.
    """
    part = map_tensor(path, "part")
    try:
        if graph.ids is not None and part.shape == graph.ids.shape:
            part = part[graph.ids]
        return PartitionBook.of(graph, part, num_parts)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def find_method(name: str) -> Method | None:
    """Return a partition method of weft, or one that was registered or that an installed package declares, or None."""
    if (function := load_entry_point("partition", name, METHODS)) is not None:
        METHODS[name] = custom_method(function)
    return METHODS.get(name)


def custom_method(function: Callable[[Graph, int], Any]) -> Method:
    """Return a partition method, as in METHODS, that calls a user-defined function and checks its result.

    Args:
        function: Function that returns the part of each vertex, [N], from a graph and the number of parts.
    """
    return lambda graph, num_parts, _: PartitionBook.of(graph, function(graph, num_parts), num_parts).part


def require_writable(path: Path) -> None:
    """Raise InputError if a path exists and is no book."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder: give a file's name")
    if path.exists() and not is_book(path):
        raise InputError(f"{path}: exists and is no partition book: choose another file")


def is_book(path: Path) -> bool:
    """Return whether a file is a book, of any version."""
    try:
        return read(path)[0].get("format") == FORMAT
    except InputError:
        return False


def read(path: Path) -> tuple[dict[str, str], Tensor]:
    """Return metadata and parts of a file, unchecked.

    Raises:
        InputError: If it is no complete safetensors file with parts.
    """
    with readable(path, REMEDY), open_tensors(path) as file:
        return file.metadata() or {}, file.get_tensor("part")


def checksum(about: str, part: Tensor) -> str:
    """Return the sha256 of a book's description and parts, 64 hex digits.

    Args:
        about: Description of the book, as JSON.
        part: Part of each vertex.
    """
    digest = hashlib.sha256(about.encode())
    digest.update(part.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
