"""Aggregates over in-edges, as values: sums, means, maxima and attention."""
