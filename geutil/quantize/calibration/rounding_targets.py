"""Weights that can be rounded by their layer's results on data, biases, corrections.

A correction is a small number that is added to a weight or bias. Weights are rounded by
a FakeQuant op; a correction before it decides the side, and 0 is to the nearest level.
Weights themselves stay as they are, and so do other models that read them; training
goes on from where rounding left off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph import creation, functions, op_types, replicas, state
from geutil.graph.edits import InputEdit, apply_edits
from geutil.graph.resource_variables import handle_in, variables_outside
from geutil.graph.types import Graph, MutableIdentityMap, Operation, Tensor
from geutil.quantize.calibration.ranges import RangeSite, unquantized
from geutil.quantize.partial_copy import values_of
from geutil.quantize.planning.int8_kernels import FAKE_QUANT
from geutil.quantize.planning.layer_rows import RowsOfLayer, rows_of
from geutil.quantize.planning.network import (
    CORRECTION,
    Edge,
    Network,
    forwarded_from,
    simulation_of,
    uncorrected_input,
)
from geutil.quantize.spec import Range, levels, nudged, step
from geutil.select.networks.layers import Layer

Array = np.ndarray[Any, Any]

_MOST_INPUTS = 8192
"""Products of more fill memory: 0.5 GB for these, of which the solvers take five."""
_MOVES = frozenset(("ExpandDims", "Identity", "Reshape", "Squeeze"))
"""Ops that keep the order of values."""


@dataclass(frozen=True)
class NotRounded:
    """A layer whose weights are rounded to the nearest levels.

    Attributes:
        op: the layer, by the name of its op.
        op_type: its type.
        reason: why they were not rounded by data.
    """

    op: str
    op_type: str
    reason: str

    def __str__(self) -> str:
        return f"not rounded by data: it {self.reason}"


@dataclass(frozen=True, eq=False)
class Grid:
    """The values that weights can have: `low + step * k` for k from 0 to `most`."""

    low: Array  # the lowest value of each weight, in the shape of the weights
    step: Array  # the distance of two values; 0 where all weights of a channel are 0
    most: int  # the largest k

    def level(self, values: Array, where: Any = ...) -> Array:
        """Return the k of the values nearest to given ones, as floats."""
        step = self.step[where]
        safe = np.where(step > 0, step, np.float32(1.0))
        levels = np.floor((values - self.low[where]) / safe + np.float32(0.5))
        return np.clip(levels, 0, self.most)

    def value(self, levels: Array, where: Any = ...) -> Array:
        """Return the values of levels."""
        return self.low[where] + self.step[where] * levels

    def nearest(self, values: Array, where: Any = ...) -> Array:
        """Return the values nearest to given ones."""
        return self.value(self.level(values, where), where)


@dataclass(frozen=True, eq=False)
class Target:
    """A layer whose weights can be rounded."""

    rows: RowsOfLayer  # the layer as a product of rows with matrices
    # The FakeQuant ops of its weights: its own, and those of layers that read the same.
    simulations: tuple[Operation, ...]
    site: RangeSite  # the range of its weights
    values: Array  # its weights, in the shape that these ops make
    shares_range: bool  # whether other weights have the same range
    path: tuple[Tensor, ...]  # the tensors between the two, from the FakeQuant op on
    bias: Edge | None  # what adds its bias; None if it has none of its own

    @property
    def layer(self) -> Layer:
        """The layer."""
        return self.rows.layer

    def matrices(self, values: Array) -> Array:
        """Return a FakeQuant op's values as matrices: [groups, inputs, outputs]."""
        return self.rows.matrices(self._to_kernel(values))

    def simulated(self, matrices: Array) -> Array:
        """Return matrices in the shape that the FakeQuant op makes."""
        return self._from_kernel(self.rows.weights(matrices))

    def skipped(self, reason: str) -> NotRounded:
        """Return the entry of a layer that is left as it is."""
        return _skip(self.layer.op, reason)

    def _to_kernel(self, values: Array) -> Array:
        """Return a layer's weights for values of its FakeQuant op."""
        for t in self.path:
            if t.op.type == "Transpose":
                values = values.transpose(_permutation(t.op))
            else:
                values = values.reshape(t.shape.as_list())
        return values

    def _from_kernel(self, values: Array) -> Array:
        """Return a FakeQuant op's values for weights of its layer."""
        for t in reversed(self.path):
            if t.op.type == "Transpose":
                values = values.transpose(np.argsort(_permutation(t.op)))
            else:
                values = values.reshape(t.op.inputs[0].shape.as_list())
        return values

    def grid(self, ends: Range) -> Grid:
        """Return the values that weights can have in a range, as matrices."""
        form = self.site.form
        low, _ = nudged(*ends, form.bits, form.narrow_range)
        width = step(*ends, form.bits, form.narrow_range)
        shape = self.values.shape
        low_values, steps = (
            self.matrices(np.broadcast_to(end, shape)) for end in (low, width)
        )
        return Grid(low_values, steps, levels(form.bits, form.narrow_range) - 1)


def _permutation(op: Operation) -> Array:
    return np.asarray(tf.get_static_value(op.inputs[1]))


def find_targets(
    network: Network, sites: Sequence[RangeSite]
) -> list[Target | NotRounded]:
    """Return the layers of a network whose weights are quantized, in order."""
    site_by_op = {op: site for site in sites if site.is_weights for op in site.ops}
    # Corrections that there are by now do not count.
    values = values_of([op.inputs[0] for op in site_by_op], unquantized)
    value_by_op = dict(zip(site_by_op, values, strict=True))
    found: list[Target | NotRounded] = []
    first_reader: dict[Operation, str] = {}
    for op in network.ops:
        layer = network.layers.get(op)
        if layer is None:
            continue
        if simulation_of(layer.kernel) is None:
            continue
        path = _path(layer.kernel)
        if path is None:
            found.append(_skip(op, "has weights that change after they are rounded"))
            continue
        simulation = path[0].op.inputs[0].op if path else layer.kernel.op
        site = site_by_op.get(simulation)
        if site is None:
            found.append(_skip(op, "has weights in a fixed range"))
        elif simulation in first_reader:
            earlier = first_reader[simulation]
            found.append(_skip(op, f"has the weights of '{earlier}', rounded for that"))
        else:
            rows = rows_of(layer)
            if isinstance(rows, str):
                found.append(_skip(op, rows))
                continue
            if rows.sizes[1] > _MOST_INPUTS:
                size = 8e-9 * rows.sizes[0] * rows.sizes[1] ** 2
                why = f"multiplies {rows.sizes[1]} values, whose products take"
                found.append(_skip(op, f"{why} {size:.1f} GB"))
                continue
            value = value_by_op[simulation]
            same = tuple(o for o in site.ops if np.array_equal(value_by_op[o], value))
            first_reader |= dict.fromkeys(same, op.name)
            shares_range = len(same) < len(site.ops)
            bias = _bias_of(layer, network)
            found.append(
                Target(rows, same, site, value, shares_range, tuple(path), bias)
            )
    return found


def _skip(op: Operation, reason: str) -> NotRounded:
    return NotRounded(op.name, op.type, reason)


def _path(kernel: Tensor) -> list[Tensor] | None:
    """Return the tensors from a FakeQuant op to weights; None if there is no such."""
    path: list[Tensor] = []
    while kernel.op.type not in FAKE_QUANT:
        op = kernel.op
        moves = op.type in _MOVES
        moves |= (
            op.type == "Transpose" and tf.get_static_value(op.inputs[1]) is not None
        )
        if not moves or not kernel.shape.is_fully_defined():
            return None
        path.insert(0, kernel)
        kernel = op.inputs[0]
    return path if kernel.shape.is_fully_defined() else None


def _bias_of(layer: Layer, network: Network) -> Edge | None:
    """Return the input of an op that is a layer's bias, and nothing else's."""
    # Ops may stand between that only move values: those around a dilated convolution.
    if layer.spreads:
        return None
    tensor = layer.result
    while True:
        readers = network.readers(tensor)
        if len(readers) != 1 or tensor in network.results:
            return None
        op, slot = readers[0]
        if op.type in op_types.BIAS_ADDITIONS:
            break
        if op.type not in ("BatchToSpaceND", "Identity"):
            return None
        tensor = op.outputs[0]
    other = op.inputs[1 - slot]
    channels = int(np.prod(layer.sizes(layer.outputs) or [0]))
    if not network.is_parameter(other) or other.shape.num_elements() != channels:
        return None
    axis = -1 if op.type == "BiasAdd" else layer.axis
    sizes = other.shape.as_list()
    if len(sizes) < -axis or sizes[axis] != channels:
        return None
    if forwarded_from(other).op.type in FAKE_QUANT:
        return None
    return Edge(op, 1 - slot)


SUFFIX = "correction"


@dataclass(eq=False)
class Correction:
    """A number that is added to each element of a tensor."""

    variable: Any
    read: Operation

    def set(self, value: Array) -> None:
        """Set the correction."""
        shape = self.variable.shape.as_list()
        whole = replicas.whole(self.variable)
        whole.assign(value.reshape(shape).astype(np.float32))


def corrections_of(
    graph: Graph, variables: Mapping[str, Any]
) -> dict[Operation, Correction]:
    """Return the corrections of a FuncGraph, by the ops that add them."""
    sums = [op for op in graph.get_operations() if uncorrected_input(op) is not None]
    outside = MutableIdentityMap(
        (inside, external) for external, inside in functions.bindings(graph)
    )
    by_handle = {id(replicas.first_copy(v).handle): v for v in variables.values()}
    found = {}
    for op in sums:
        read = op.inputs[1].op
        variable = by_handle.get(id(outside.get(read.inputs[0])))
        if variable is not None:
            found[op] = Correction(variable, read)
    return found


@contextmanager
def cleared(graph: Graph, variables: Mapping[str, Any]) -> Iterator[None]:
    """Set the corrections of a FuncGraph to zero; put them back if the block raises."""
    corrections = corrections_of(graph, variables).values()
    before = [(each, each.variable.numpy()) for each in corrections]
    for correction, value in before:
        correction.set(np.zeros_like(value))
    try:
        yield
    except BaseException:
        for correction, value in before:
            correction.set(value)
        raise


def corrected(
    graph: Graph, edges: Sequence[tuple[str, list[Edge]]], variables: Mapping[str, Any]
) -> list[Correction]:
    """Add zero to tensors, in variables that can be set."""
    by_op = corrections_of(graph, variables)
    found = [by_op.get(_tensor(readers[0]).op) for _, readers in edges]
    new = [
        (f"{name}/{SUFFIX}", _tensor(readers[0]))
        for (name, readers), existing in zip(edges, found, strict=True)
        if existing is None
    ]
    state.check_editable(graph, [e.op for _, readers in edges for e in readers])
    made = iter(
        variables_outside(
            graph, [(n, np.zeros(t.shape.as_list(), np.float32)) for n, t in new]
        )
    )
    edits: list[InputEdit] = []
    corrections: list[Correction] = []
    for (_, readers), existing in zip(edges, found, strict=True):
        if existing is not None:
            corrections.append(existing)
            continue
        variable = next(made)
        correction, total = _sum(readers[0], variable)
        corrections.append(correction)
        edits += [InputEdit(edge.op, edge.slot, total) for edge in readers]
    state.renew_order(graph)
    apply_edits(graph, edits)
    return corrections


def _tensor(edge: Edge) -> Tensor:
    return edge.op.inputs[edge.slot]


def _sum(edge: Edge, variable: Any) -> tuple[Correction, Tensor]:
    op, tensor = edge.op, _tensor(edge)
    handle = handle_in(op.graph, variable)
    with creation.surroundings_of(op):
        read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
        total = tf.raw_ops.AddV2(x=tensor, y=read, name="corrected")
    creation.set_mark(total.op, CORRECTION)
    return Correction(variable, read.op), total
