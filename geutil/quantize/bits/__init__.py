"""Bits of weights, chosen layer by layer under a budget."""
