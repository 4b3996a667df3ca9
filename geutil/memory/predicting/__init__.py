"""From a graph to a prediction of what its step holds."""
