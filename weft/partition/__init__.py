"""Which part every vertex belongs to, and what a part then lacks. Knows graphs, no ranks and no models."""

from weft.core.config import PartitionOptions
from weft.partition.assign import METHODS
from weft.partition.book import Book, make_book
from weft.partition.chunks import Chunk, WorkingSet, cut_evenly, cut_to_fit, make_chunks
from weft.partition.dependencies import Caching, Dependencies, Hop, make_dependencies, range_bounds, range_parts
from weft.partition.quality import Quality
from weft.partition.ranges import Part, chunk_sources, chunk_vertices, reorder
from weft.partition.schedule import Batch, Rates, Schedule, Volumes, make_schedule

__all__ = [
    "METHODS",
    "Batch",
    "Book",
    "Caching",
    "Chunk",
    "Dependencies",
    "Hop",
    "Part",
    "PartitionOptions",
    "Quality",
    "Rates",
    "Schedule",
    "Volumes",
    "WorkingSet",
    "chunk_sources",
    "chunk_vertices",
    "cut_evenly",
    "cut_to_fit",
    "make_book",
    "make_chunks",
    "make_dependencies",
    "make_schedule",
    "range_bounds",
    "range_parts",
    "reorder",
]
