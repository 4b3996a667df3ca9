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
from geutil.quantize.reestimation.norms import Missed
from geutil.quantize.reestimation.reestimating import reestimate_batch_norm
from geutil.quantize.reestimation.report import Reestimated, ReestimateReport
from geutil.quantize.report import Quantized, QuantizeReport, Skipped
from geutil.quantize.spec import Spec

__all__ = [
    "CalibrationReport",
    "EqualizeReport",
    "Equalized",
    "Int8Comparison",
    "Missed",
    "NotEqualized",
    "OutputSteps",
    "QuantizeReport",
    "Quantized",
    "ReestimateReport",
    "Reestimated",
    "Skipped",
    "Spec",
    "calibrate",
    "compare_int8",
    "equalize",
    "quantize",
    "reestimate_batch_norm",
    "to_int8",
]
