"""Chunks of a graph and the passes over them, independent of any strategy."""
