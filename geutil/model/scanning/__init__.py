"""Powers of models: what they can do beyond computing, told from their files."""
