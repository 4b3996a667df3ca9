"""Rounding of weights that looks at what a layer makes of data."""
