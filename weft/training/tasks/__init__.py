"""What a run learns: node classification or link prediction, its losses and metrics."""
