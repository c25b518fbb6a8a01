"""How the ranks of a run start, on this machine or under torchrun."""
