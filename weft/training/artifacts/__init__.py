"""Files of a run's folder: checkpoints, records, the model card."""
