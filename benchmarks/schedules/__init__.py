"""What a step holds under many schedules, against what its report says."""
