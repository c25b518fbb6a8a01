"""Names of environment variables that all processes of a test session share."""

EVERY_CASE = "WEFT_TEST_EVERY_CASE"
"""Set by tests/conftest.py if slow tests are requested as well."""
REFERENCES = "WEFT_TEST_REFERENCES"
"""Folder of results of `single`, which each process reads instead of computing them again."""
