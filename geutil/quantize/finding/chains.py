"""What becomes part of a kernel: the bias and the activation behind a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from geutil.graph.kinds import Operation, Tensor
from geutil.quantize.finding.kernels import (
    FUSED_ACTIVATIONS,
    KERNELS,
    Treatment,
)
from geutil.quantize.finding.network import Network

_SUMS = frozenset(("Add", "AddV2", "BiasAdd", "BiasAddV1"))


@dataclass(frozen=True, eq=False)
class Chain:
    """Ops that one kernel computes.

    Attributes:
        ops: the ops, in order; the first one does the work.
        result: what the last one makes.
        activation: the activation at the end; "" if there is none.
    """

    ops: tuple[Operation, ...]
    result: Tensor
    activation: str

    @property
    def inside(self) -> tuple[Tensor, ...]:
        """What the ops make on the way that has the shape of the result."""
        found: list[Tensor] = []
        for op in reversed(self.ops[:-1]):
            (tensor,) = op.outputs
            if tensor.shape.rank is None or self.result.shape.rank is None:
                break
            if tensor.shape.as_list() != self.result.shape.as_list():
                break
            found.append(tensor)
            if _passes(op):
                break
        return tuple(found)


def chain_from(
    op: Operation, network: Network, may_take: Callable[[Operation], bool]
) -> Chain:
    """Return what the kernel of an op computes besides it.

    Args:
        op: a layer, or another op that a Relu can become part of.
        network: its network.
        may_take: tells whether an op may be taken in.
    """
    taken = [op]
    passed: list[Operation] = []
    tensor, cursor = op.outputs[0], op.outputs[0]
    layer = network.layers.get(op)
    # What it makes is a matrix, to which the converter gives its axes afterwards.
    takes_bias = layer is not None and not layer.spreads
    # Without a bias the converter runs the two one by one, the layer in float.
    takes_activation = layer is None or not layer.transposed
    while cursor not in network.results and network.quantized(cursor) is None:
        edges = network.readers(cursor)
        if len(edges) != 1 or not may_take(edges[0].op):
            break
        reader, index = edges[0]
        if reader.type in FUSED_ACTIVATIONS:
            if not takes_activation:
                break
            taken += [*passed, reader]
            return Chain(
                tuple(taken), reader.outputs[0], FUSED_ACTIVATIONS[reader.type]
            )
        if takes_bias and _is_bias(reader, index, network):
            if not all(_leaves_channels(p, reader, index) for p in passed):
                break
            taken += [*passed, reader]
            passed = []
            takes_bias, takes_activation = False, True
        elif takes_bias and _is_correction(reader, index, network):
            taken += [*passed, reader]
            passed = []
        elif op in network.layers and _may_stand_between(reader, network):
            # The converter moves a bias over some of these.
            passed.append(reader)
            cursor = reader.outputs[0]
            continue
        else:
            break
        tensor = cursor = reader.outputs[0]
    return Chain(tuple(taken), tensor, "")


def _passes(op: Operation) -> bool:
    kernel = KERNELS.get(op.type)
    return kernel is not None and kernel.treatment is Treatment.PASSES


def _may_stand_between(op: Operation, network: Network) -> bool:
    """Tell whether an op may stand between a layer and its bias.

    A BatchToSpace does in a dilated convolution only.
    """
    return _passes(op) and (op.type != "BatchToSpaceND" or op in network.gathered)


def _leaves_channels(op: Operation, bias: Operation, index: int) -> bool:
    """Tell whether the converter moves a bias over an op that stands before it.

    Over a Reshape to a shape that is known, if it adds to the last axis, which stays.
    """
    if op.type != "Reshape":
        return True
    if tf.get_static_value(op.inputs[1]) is None:
        return False
    before, after = op.inputs[0].shape, op.outputs[0].shape
    value = bias.inputs[1 - index].shape
    if None in (before.rank, after.rank) or value.rank != 1:
        return False
    return bool(before[-1] == after[-1] == value[-1])


def _is_bias(op: Operation, index: int, network: Network) -> bool:
    if op.type not in _SUMS:
        return False
    other = op.inputs[1 - index]
    return network.is_parameter(other) or network.is_statistic(other)


def _is_correction(op: Operation, index: int, network: Network) -> bool:
    """Tell whether a product puts right what a folded norm in training differs by."""
    return op.type == "Mul" and network.is_statistic(op.inputs[1 - index])
