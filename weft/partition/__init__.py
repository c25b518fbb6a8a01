"""Partitions of a graph's vertices, and what each part needs from the others. Independent of ranks and models."""

from weft.config.config import PartitionOptions
from weft.partition.assign import METHODS, metis
from weft.partition.book import PartitionBook, array_book, custom_method, find_method, make_book
from weft.partition.dependencies import Caching, Choice, Dependencies, Hop, make_dependencies, range_bounds, range_parts
from weft.partition.quality import Quality
from weft.partition.vertex_cover import Cover

__all__ = [
    "METHODS",
    "Caching",
    "Choice",
    "Cover",
    "Dependencies",
    "Hop",
    "PartitionBook",
    "PartitionOptions",
    "Quality",
    "array_book",
    "custom_method",
    "find_method",
    "make_book",
    "make_dependencies",
    "metis",
    "range_bounds",
    "range_parts",
]
