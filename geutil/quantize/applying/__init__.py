"""Puts FakeQuant ops into a graph."""
