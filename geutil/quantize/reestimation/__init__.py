"""Statistics of batch norms from data, without training."""
