"""What a configuration says of where vertices live."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from weft.core.config import Config
from weft.core.errors import InputError, unknown
from weft.core.units import parse_bytes
from weft.cost import Factors
from weft.data import Graph
from weft.partition import METHODS, Book, make_book
from weft.strategies import Placement, get_strategy


def rows_device(config: Config) -> str:
    """The device of the rows, their maps and the exchange. InputError where they are to be where there is no room."""
    if config.strategy == "offload":
        return config.device  # its rows are on the host, and come to the device chunk by chunk
    if config.nn_device == "device" and config.device_memory:
        raise InputError("--nn-device device: under --device-memory rows are mapped on the host: leave one out")
    if config.nn_device == "host" and config.device != "cpu" and not config.device_memory:
        raise InputError("--nn-device host is for --device-memory: give that as well, or leave it out")
    return "cpu" if config.nn_device == "host" or config.device_memory else config.device


def make_placement(config: Config, graph: Graph) -> Placement:
    """The placement of a run on the configuration's workers, as far as its strategy reads it.

    InputError for a book of another graph or another number of parts, an unknown method, and files that cannot be read.
    """
    strategy = get_strategy(config.strategy)
    book = _book(config, graph) if strategy.takes_parts and config.partition != "range" else None
    factors = Factors.read(Path(config.probe)) if strategy.takes_factors and config.probe else None
    return replace(plain_placement(config), part=book.part if book else None, factors=factors)


def plain_placement(config: Config) -> Placement:
    """What a configuration says by itself, without partitions and files. InputError for an amount that is none."""
    if -1 < config.cache_ratio < 0:
        raise InputError(f"--cache-ratio {config.cache_ratio}: give a share from 0 to 1, or -1 for where it costs less")
    return Placement(
        cache_ratio=config.cache_ratio if config.cache_ratio >= 0 else None,
        cache_bytes=parse_bytes(config.cache_memory, "--cache-memory") if config.cache_memory else None,
        device_bytes=parse_bytes(config.device_memory, "--device-memory") if config.device_memory else None,
        chunks=config.chunks,
        intermediates=config.intermediates,
        scratch=Path(config.scratch) if config.scratch else None,
        device=config.device,
        refresh_every=config.refresh_every,
        staleness=config.staleness,
    )


def _book(config: Config, graph: Graph) -> Book:
    name, workers = config.partition, config.workers
    if name in METHODS:
        if workers > graph.num_vertices:
            raise InputError(
                f"--workers {workers}: {graph.name} has {graph.num_vertices} vertices: give at most as many"
            )
        return make_book(graph, workers, method=name)
    if not Path(name).exists() and not Path(name).suffix:
        raise unknown("--partition", name, METHODS)
    book = Book.open(name, graph)
    if book.num_parts != workers:
        raise InputError(f"--partition {name}: has {book.num_parts} parts: give as many --workers or ranks")
    return book
