"""Aggregates over columns of all rows, chunk by chunk (NeutronTP)."""
