"""Files of models: read, checked and reported before TensorFlow sees them."""
