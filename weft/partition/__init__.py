"""Which rank answers for which vertices, and what it then lacks. Knows graphs, no ranks and no models."""

from weft.partition.halo import Halo, make_halo, range_bounds

__all__ = ["Halo", "make_halo", "range_bounds"]
