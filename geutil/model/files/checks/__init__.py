"""What TensorFlow must not be given: each module holds one kind of check."""
