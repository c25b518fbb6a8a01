"""Datasets by name, which are downloaded once: their raw files, and a reader that does not unpickle."""
