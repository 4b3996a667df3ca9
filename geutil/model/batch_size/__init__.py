"""Batch size changes: ops that hard-code the old one, their repair, the proof."""
