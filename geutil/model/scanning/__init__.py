"""What a model can do beyond computing, told from its files alone: nothing is run."""
