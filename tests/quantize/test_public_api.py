"""The public surface of `geutil.quantize`, frozen; see tests/test_public_api.py."""

from geutil import quantize
from tests.documented import check_surface

OTHERS = """
    BitOption BitPlan CalibrationReport CurvePoint EqualizeReport Equalized
    InsertReport Int8Comparison LayerBits LayerNoise
    Missed NarrowInput NotEqualized NotRounded OutputSteps PeakTensor QuantizeReport
    Quantized ReestimateReport Reestimated ReorderedFile ReorderedSubgraph RewriteReport
    Rounded Skipped Spec
"""
SIGNATURES = """
arena_bytes(blob: bytes, *, reference: bool = False) -> int
calibrate(model: Any, dataset: Any, method: str = best, *, rounding: str | None = None,
    clipping: str | None = None, correct_bias: bool | None = None, decay: float =
    0.9, percentile: float = 99.99, bins: int = 2048, progress: bool | None = None)
    -> CalibrationReport
choose_bits(model: Any, data: Any, *, size: int | float | None = None, noise: float
    | None = None, accuracy: tuple[Metric, float] | None = None, bits: Sequence[int] |
    None = None, scheme: str = int8, method: str = best, batches: int = 8) ->
    BitPlan
compare_int8(model: Any, tflite: bytes, dataset: Any, *, layers: bool = False) ->
    Int8Comparison
create_eval_graph(input_graph: Graph | None = None) -> RewriteReport
create_training_graph(input_graph: Graph | None = None, quant_delay: int = 0, *,
    statistics: str = exact) -> RewriteReport
equalize(model: Any, *, replace_relu6: bool = False) -> EqualizeReport
experimental_create_eval_graph(input_graph: Graph | None = None, weight_bits: int =
    8, activation_bits: int = 8, symmetric: bool = True, quant_delay: int | None =
    None, scope: str | None = None) -> RewriteReport
experimental_create_training_graph(input_graph: Graph | None = None, weight_bits:
    int = 8, activation_bits: int = 8, symmetric: bool = True, quant_delay: int = 0,
    freeze_bn_delay: int | None = None, scope: str | None = None, *, statistics: str
    = exact) -> RewriteReport
fixed_quantize(inputs: Tensor, init_min: float = -6.0, init_max: float = 6.0, scope:
    str | None = None, num_bits: int = 8, narrow_range: bool = False) -> Tensor
insert_quant_op(context: str | None, name: str, producer: Operation, consumers:
    Iterable[Operation], *, is_training: bool, moving_avg: bool = True, init_min:
    float = -6.0, init_max: float = 6.0, bits: int = 8, ema_decay: float = 0.999,
    quant_delay: int | None = None, vars_collection: str | None = None,
    narrow_range: bool = False, producer_scope: str | None = None, consumer_scope:
    str | None = None) -> InsertReport
last_value_quantize(inputs: Tensor, per_channel: bool = False, init_min: float =
    -6.0, init_max: float = 6.0, vars_collection: str | None = None, name_prefix:
    str = LastValueQuant, *, is_training: bool = True, num_bits: int = 8,
    narrow_range: bool = False, symmetric: bool = False, variables: Variables =
    None) -> Tensor
least_memory_order(blob: bytes, *, runtime: Runtime | None = None, iterations: int =
    20000) -> ReorderedFile
moving_avg_quantize(inputs: Tensor, per_channel: bool = False, init_min: float =
    -6.0, init_max: float = 6.0, ema_decay: float = 0.999, vars_collection: str |
    None = moving_average_variables, name_prefix: str = MovingAvgQuantize, *,
    is_training: bool = True, num_bits: int = 8, narrow_range: bool = False,
    symmetric: bool = False, variables: Variables = None) -> Tensor
quantize(graph_or_model: Any, *, scheme: str | None = None, is_training: bool =
    True, weight_bits: int = 8, activation_bits: int = 8, symmetric_weights: bool =
    True, per_channel: bool = True, ema_decay: float = 0.999, quant_delay: int |
    None = None, step: Any = None, vars_collection: str | None = None, variables:
    Mapping[str, Any] | None = None, scope: Any = None, overrides:
    Mapping[Any, Override] | None = None, activations: Iterable[str] = (gelu,
    hard_swish, leaky_relu, log_softmax, prelu, relu, relu6, sigmoid, silu, softmax,
    tanh), strict: bool = False, outputs: Any = ()) -> QuantizeReport
reestimate_batch_norm(model: Any, dataset: Any) -> ReestimateReport
to_int8(model: Any, representative: Any = None, *, input_type: str | Mapping[str, str]
    | None = None, output_type: str | Mapping[str, str] | None = None) -> bytes
to_tflite(model: Any, *, scheme: str | None = None, representative: Any = None, order:
    str = converter, input_type: str | Mapping[str, str] | None = None, output_type:
    str | Mapping[str, str] | None = None) -> bytes
"""


def test_the_public_surface():
    check_surface(quantize, OTHERS, SIGNATURES)
