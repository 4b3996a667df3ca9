"""Neural networks: which ops and tensors are parameters, statistics, layers."""
