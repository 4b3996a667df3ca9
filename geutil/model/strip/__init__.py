"""The parts of a model that serve its training only, stripped."""
