"""Models: those that the command line knows, and what is checked or exported of a model."""
