"""Kernels of TensorFlow: the buffers that ops make, share and need, by device."""
