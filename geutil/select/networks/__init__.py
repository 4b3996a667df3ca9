"""What ops and tensors are in a neural network: parameters, statistics, layers."""
