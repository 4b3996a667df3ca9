"""What a model holds for its training only, and how it is taken out."""
