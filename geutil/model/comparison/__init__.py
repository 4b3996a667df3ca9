"""What two models compute, side by side."""
