"""Ranges from data, without training."""
