"""Files in the folder of a run: checkpoints, records, model card."""
