"""Simulated quantization: FakeQuant ops in a graph, trained or calibrated, to int8."""

from geutil.quantize.quantizing import quantize
from geutil.quantize.report import Quantized, QuantizeReport, Skipped
from geutil.quantize.spec import Spec

__all__ = ["QuantizeReport", "Quantized", "Skipped", "Spec", "quantize"]
