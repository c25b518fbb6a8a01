"""Sections of the report: curves, inputs, volumes, time and costs."""
