"""Folds for training: statistics of the batch, weights scaled by the moving ones."""
