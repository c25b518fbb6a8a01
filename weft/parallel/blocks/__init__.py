"""Blocks of vertex parallelism: a rank's in-edges of each aggregate, and the exchange of the rows that it lacks."""
