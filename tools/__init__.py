"""Checks of the project that are no tests."""
