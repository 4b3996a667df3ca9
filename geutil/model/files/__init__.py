"""Files of models: read, checked and told, before TensorFlow sees them."""
