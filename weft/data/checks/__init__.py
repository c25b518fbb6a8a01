"""Checks of a graph's arrays and values."""
