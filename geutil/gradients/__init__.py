"""Memory-saving gradients: gradient checkpointing for TensorFlow graphs."""
