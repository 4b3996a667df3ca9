"""Measures a step in a fresh process.

The parent makes a `Job` of what shall be measured, the child runs it and sends a
`Measurement` back.
"""
