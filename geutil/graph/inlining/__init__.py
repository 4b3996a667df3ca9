"""Replacing calls by the bodies of the functions they call, in a `GraphDef`."""

from geutil.graph.inlining.replacing import Inlined, Kept, Origin, inline_calls

__all__ = ["Inlined", "Kept", "Origin", "inline_calls"]
