"""The schema of a run: its options, their files, and the optimisations that can be switched off."""
