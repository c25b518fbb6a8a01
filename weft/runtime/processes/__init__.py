"""Processes of a run: how they start, stop and share cores, and what they use."""
