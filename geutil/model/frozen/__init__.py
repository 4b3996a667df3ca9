"""Variables into constants, and back."""
