"""Quantized files: how far from float, and how accurate, next to those of peers."""
