"""Finds what is quantized and decides how; reads the graph and changes nothing."""
