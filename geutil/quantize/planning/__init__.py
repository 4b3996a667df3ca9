"""The plan of quantization: which ops, and how; the graph is only read."""
