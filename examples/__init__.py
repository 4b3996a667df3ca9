"""Runnable examples: `make demo` runs `mobilenet`, `int8`, `pages` and `training`."""
