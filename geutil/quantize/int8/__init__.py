"""From simulated quantization to the integers of TFLite, and back to compare."""
