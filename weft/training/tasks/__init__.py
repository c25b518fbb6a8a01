"""Tasks of a run: node classification, regression and link prediction, with their losses and metrics."""
