"""What is in files: read, checked and told, before TensorFlow sees it."""
