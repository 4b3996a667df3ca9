"""Simulated quantization with FakeQuant ops, and conversion to integer TFLite files."""

from geutil.quantize.bit_plans import BitOption, BitPlan, CurvePoint, LayerBits
from geutil.quantize.bit_search import choose_bits
from geutil.quantize.calibration.calibration import CalibrationReport, calibrate
from geutil.quantize.calibration.ranges import NarrowInput
from geutil.quantize.calibration.rounding import Rounded
from geutil.quantize.calibration.rounding_targets import NotRounded
from geutil.quantize.contrib import (
    InsertReport,
    RewriteReport,
    create_eval_graph,
    create_training_graph,
    experimental_create_eval_graph,
    experimental_create_training_graph,
    fixed_quantize,
    insert_quant_op,
    last_value_quantize,
    moving_avg_quantize,
)
from geutil.quantize.equalization import (
    Equalized,
    EqualizeReport,
    NotEqualized,
    equalize,
)
from geutil.quantize.reestimation import (
    Missed,
    Reestimated,
    ReestimateReport,
    reestimate_batch_norm,
)
from geutil.quantize.report import Quantized, QuantizeReport, Skipped
from geutil.quantize.simulation import quantize
from geutil.quantize.spec import Spec
from geutil.quantize.tflite.conversion import to_int8, to_tflite
from geutil.quantize.tflite.layer_noise import LayerNoise
from geutil.quantize.tflite.least_memory import (
    PeakTensor,
    ReorderedFile,
    ReorderedSubgraph,
    arena_bytes,
    least_memory_order,
)
from geutil.quantize.tflite.step_comparison import (
    Int8Comparison,
    OutputSteps,
    compare_int8,
)

__all__ = [
    "BitOption",
    "BitPlan",
    "CalibrationReport",
    "CurvePoint",
    "InsertReport",
    "EqualizeReport",
    "Equalized",
    "Int8Comparison",
    "LayerNoise",
    "Missed",
    "LayerBits",
    "NarrowInput",
    "NotEqualized",
    "NotRounded",
    "OutputSteps",
    "QuantizeReport",
    "PeakTensor",
    "Quantized",
    "RewriteReport",
    "ReestimateReport",
    "Reestimated",
    "Rounded",
    "ReorderedFile",
    "ReorderedSubgraph",
    "Skipped",
    "Spec",
    "arena_bytes",
    "calibrate",
    "choose_bits",
    "compare_int8",
    "create_eval_graph",
    "create_training_graph",
    "experimental_create_eval_graph",
    "experimental_create_training_graph",
    "fixed_quantize",
    "insert_quant_op",
    "last_value_quantize",
    "least_memory_order",
    "moving_avg_quantize",
    "equalize",
    "quantize",
    "reestimate_batch_norm",
    "to_int8",
    "to_tflite",
]
