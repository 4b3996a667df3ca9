"""Batches: a pipeline of steps over many models, each in a process of its own."""
