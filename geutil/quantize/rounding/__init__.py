"""Rounding of weights by a layer's results on data."""
