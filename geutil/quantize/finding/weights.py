"""Weights: which tensors are the same ones, and how they are stored."""

from __future__ import annotations

from geutil.graph.kinds import Operation, Tensor
from geutil.graph.op_types import CONVOLUTIONS_2D, SELECTS
from geutil.quantize.finding.kernels import FAKE_QUANT, PASSING
from geutil.quantize.spec import Format, Spec
from geutil.select.networks.layers import Layer

_READS = frozenset(("Identity", "ReadVariableOp"))
# What hands values on, and what chooses while quantization is delayed.
_AROUND = PASSING | SELECTS
# With ranges for each channel the converter refuses other layers (TensorFlow 2.21:
# "'tfl.transpose' op has mismatched quantized axes").
_BY_CHANNEL = CONVOLUTIONS_2D


def source_of(weights: Tensor) -> Tensor:
    """Return what weights are read from: a constant, or the handle of a variable.

    Of weights that are computed, these.
    """
    tensor = weights
    while tensor.op.type in _READS and len(tensor.op.inputs) == 1:
        tensor = tensor.op.inputs[0]
    return tensor


def is_quantized(weights: Tensor) -> bool:
    """Tell whether weights come from a FakeQuant op."""
    waiting = [weights.op]
    for op in waiting:
        if op.type in FAKE_QUANT:
            return True
        if op.type in _AROUND:
            waiting += [t.op for t in op.inputs]
    return False


def format_of(layer: Layer, spec: Spec) -> Format:
    """Return how the weights of a layer are stored."""
    axes = layer.outputs if spec.per_channel and by_channel(layer.op) else ()
    if layer.sizes(axes) is None:
        axes = ()
    return _format(spec, axes)


def constant_format(spec: Spec) -> Format:
    """Return how a parameter is stored that is no weight of a layer."""
    return _format(spec, ())


def _format(spec: Spec, axes: tuple[int, ...]) -> Format:
    symmetric = bool(spec.symmetric_weights)
    return Format(spec.weight_bits or 8, symmetric, symmetric, axes)


def by_channel(op: Operation) -> bool:
    """Tell whether the weights of a layer can have a range for each channel."""
    return op.type in _BY_CHANNEL
