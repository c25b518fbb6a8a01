"""What a model computes between its aggregates, traced once."""
