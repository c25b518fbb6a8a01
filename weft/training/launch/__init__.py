"""Start of the ranks of a run, on this machine or under torchrun."""
