"""TFLite files of quantized models: written by scheme, run, compared in steps."""
