"""Vertices and edges from tables: data frames, Parquet, CSV and text files."""
