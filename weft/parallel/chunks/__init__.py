"""Work on a graph chunk by chunk. Knows no strategy."""
