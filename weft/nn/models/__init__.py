"""Models that the command line offers by name, checks of any model, and the export to PyG."""
