"""Layers, written as for one device: all access to the graph goes through a `View`."""
