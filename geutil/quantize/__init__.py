"""Simulated quantization: FakeQuant ops in a graph, trained or calibrated, to int8."""

from geutil.quantize.calibration.calibrating import CalibrationReport, calibrate
from geutil.quantize.equalization.equalizing import equalize
from geutil.quantize.equalization.report import (
    Equalized,
    EqualizeReport,
    NotEqualized,
)
from geutil.quantize.int8.comparing import Int8Comparison, OutputSteps, compare_int8
from geutil.quantize.int8.converting import to_int8
from geutil.quantize.quantizing import quantize
from geutil.quantize.report import Quantized, QuantizeReport, Skipped
from geutil.quantize.spec import Spec

__all__ = [
    "CalibrationReport",
    "EqualizeReport",
    "Equalized",
    "Int8Comparison",
    "NotEqualized",
    "OutputSteps",
    "QuantizeReport",
    "Quantized",
    "Skipped",
    "Spec",
    "calibrate",
    "compare_int8",
    "equalize",
    "quantize",
    "to_int8",
]
