"""The functions that a model calls, as models that can be edited."""
