"""Layers, written for one device over a View."""
