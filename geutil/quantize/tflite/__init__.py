"""TFLite files of every scheme, lowered from files of float kernels."""
