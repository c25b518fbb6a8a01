"""Tasks of a run: labels of vertices, labels of edges and link prediction, with their losses and metrics."""
