"""Vertex parallelism."""
