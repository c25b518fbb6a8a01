"""Predictions of a trained model."""
