"""Runnable examples; `make demo` runs `examples.mobilenet`."""
