"""Computation of a model between its aggregates, traced once."""
