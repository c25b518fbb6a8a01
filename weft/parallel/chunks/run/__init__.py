"""Execution of chunks on a rank."""
