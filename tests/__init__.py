"""A package, so that tests import from each other by full names."""
