"""Estimates before a run: `weft plan`, `--strategy auto` and `weft probe`."""
