"""Vertices and edges from tables: data frames, Parquet, Arrow, CSV and text files."""
