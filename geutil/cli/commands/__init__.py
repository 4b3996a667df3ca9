"""The commands, by their purposes."""
