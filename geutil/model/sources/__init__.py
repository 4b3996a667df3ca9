"""What models are opened from; each module turns one kind of source into programs."""
