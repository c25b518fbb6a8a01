"""Options of a run: their help texts, limits and files, and optimisation switches."""
