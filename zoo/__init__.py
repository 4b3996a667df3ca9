"""Real architectures through every client of geutil, next to plain TensorFlow."""
