"""Sources that models are opened from; each module turns one kind into programs."""
