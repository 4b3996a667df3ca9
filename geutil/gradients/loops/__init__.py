"""Loops that hold less for their backward pass, which computes values again.

`finding` says which loops there are and which values they would compute again,
`least_cut` which values these start from, `rebuilding` makes it so.
"""
