"""Memory-saving gradients."""
