"""Changing the batch size: what bakes the old one in, its repair, and the proof."""
