"""Runnable examples; `make demo` runs `examples.mobilenet`, then `examples.int8`."""
