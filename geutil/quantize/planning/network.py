"""The part of a graph that runs at inference.

Its readers, weights, twins, existing FakeQuants, its random layers (dropout, noise, and
arithmetic on random numbers alone), and its convolutions between moves; graphs that are
refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError, Words
from geutil.graph import (
    adjacency,
    creation,
    function_calls,
    op_types,
    replicas,
    runtime,
    types,
    v1_control_flow,
)
from geutil.graph.edits import Liveness
from geutil.graph.types import Graph, IdentitySet, Operation, Tensor, is_reference
from geutil.graph.walks import walk
from geutil.quantize.planning import int8_kernels
from geutil.quantize.planning.int8_kernels import Treatment
from geutil.quantize.spec import BLOCK_MOVES, block_of
from geutil.rewrite.matcher import match
from geutil.rewrite.rules.dropout import dropout_removal, noise_removal
from geutil.select.networks.layers import (
    DATA_SLOTS,
    Layer,
    Origin,
    Origins,
    data_format,
    layer_of,
    scalar_value,
    training_ops,
)

_NEUTRAL = {
    **dict.fromkeys(op_types.ADDITIONS, 0.0),
    "Mul": 1.0,
    "RealDiv": 1.0,
    "Sub": 0.0,
}
_COMMUTES = op_types.ADDITIONS | {"Mul"}


def neutral_input(op: Operation) -> int | None:
    """Return the input that an op yields unchanged: it adds 0, say, or times 1."""
    # None for other ops. Of variables nothing is known: they may be trained. Keras
    # writes a swish as `x * sigmoid(1.0 * x)`.
    neutral = _NEUTRAL.get(op.type)
    if neutral is None or not op.outputs[0].dtype.is_floating:
        return None
    for index in (1, 0) if op.type in _COMMUTES else (1,):
        constant, data = op.inputs[index].shape, op.inputs[1 - index].shape
        # Most are no numbers: their values, which may be large, are not looked at.
        if constant.num_elements() != 1:
            continue
        grows = constant.rank and (data.rank is None or constant.rank > data.rank)
        if not grows and scalar_value(op.inputs[index]) == neutral:
            return 1 - index
    return None


def kernel_of(op: Operation) -> int8_kernels.Kernel | None:
    """Return the int8 kernel of an op, or None."""
    # Before TensorFlow 2.20 the converter writes a BroadcastTo of up to four dimensions
    # as a product with ones, which are a constant if the shape is known, and else are
    # made in float. A SquaredDifference of more than four it writes as a difference and
    # its square, between which no FakeQuant lies.
    kernel = int8_kernels.KERNELS.get(op.type)
    if op.type == "SquaredDifference":
        rank = op.outputs[0].shape.rank
        return None if rank is None or rank > 4 else kernel
    passed = neutral_input(op)
    if passed is not None:
        return replace(int8_kernels.KERNELS["Identity"], inputs=(passed,))
    if kernel is not None or op.type != "BroadcastTo":
        return kernel
    shape = op.outputs[0].shape
    has_kernel = shape.rank is not None and (shape.rank > 4 or shape.is_fully_defined())
    return int8_kernels.KEEPING if has_kernel else None


def quantized_value(tensor: Tensor) -> Tensor | None:
    """Return the quantized version of a tensor, or None."""
    # With a delay, that is what chooses between the tensor and its quantized values.
    live = Liveness(tensor.graph)
    for reader in _readers(tensor, live):
        # Channels of several axes are brought together, and taken apart again; blocks
        # are transposed besides.
        moves: list[str] = []
        candidate: Operation | None = reader
        while candidate is not None and candidate.type in BLOCK_MOVES:
            moves.append(candidate.type)
            candidate = _behind(candidate, live)
        if candidate is None or candidate.type not in int8_kernels.FAKE_QUANT:
            continue
        # Behind other moves it quantizes another tensor of the network.
        if moves in ([[*BLOCK_MOVES]] if block_of(candidate) else _PLAIN_MOVES):
            result = _arranged_back(candidate, moves, live)
            return _chosen(result, tensor, live)
    return None


_PLAIN_MOVES: list[list[str]] = [[], ["Reshape"]]


def _readers(tensor: Tensor, live: Liveness) -> list[Operation]:
    """Return the ops that read a tensor first of all."""
    consumers = tensor.consumers()
    return [
        op for op in consumers if op.inputs[0] is tensor and not live.is_retired(op)
    ]


def _behind(op: Operation, live: Liveness) -> Operation | None:
    readers = _readers(op.outputs[0], live)
    return readers[0] if len(readers) == 1 else None


def _arranged_back(fake_quant: Operation, moves: list[str], live: Liveness) -> Tensor:
    """Return the result of a FakeQuant op behind the same moves as are before it."""
    op = fake_quant
    for kind in moves:
        back = _behind(op, live)
        if back is None or back.type != kind:
            return fake_quant.outputs[0]
        op = back
    return op.outputs[0]


def _chosen(result: Tensor, tensor: Tensor, live: Liveness) -> Tensor:
    for op in result.consumers():
        if (
            op.type in op_types.SELECTS
            and op.inputs[1] is result
            and op.inputs[2] is tensor
        ):
            return op.outputs[0]
    return result


def delayed_input(op: Operation) -> Tensor | None:
    """Return the tensor that an op forwards until quantization starts."""
    # None if it is another op: one that chooses between two tensors of the network,
    # say.
    if op.type not in op_types.SELECTS:
        return None
    quantized = op.inputs[1]
    while quantized.op.type in BLOCK_MOVES:
        quantized = quantized.op.inputs[0]
    if quantized.op.type not in int8_kernels.FAKE_QUANT:
        return None
    source, exact = quantized.op.inputs[0], op.inputs[2]
    while source is not exact and source.op.type in BLOCK_MOVES:
        source = source.op.inputs[0]
    return exact if source is exact else None


CORRECTION = "_geutil_correction"
"""The mark of sums with a correction; see `calibration.rounding`."""


def uncorrected_input(op: Operation) -> Tensor | None:
    """Return the tensor that an op adds a correction to; None if it is another op."""
    if op.type == "AddV2" and creation.has_mark(op, CORRECTION):
        return op.inputs[0]
    return None


_IN_FLOAT = "_geutil_float"
"""The mark of ops that are to compute in float in a file."""


def leave_in_float(chosen: Iterable[Operation], quantized: Iterable[Operation]) -> None:
    """Mark the ops that a caller leaves in float; take marks of others back."""
    for op in quantized:
        if is_left_in_float(op):
            creation.clear_mark(op, _IN_FLOAT)
    for op in chosen:
        creation.set_mark(op, _IN_FLOAT)


def is_left_in_float(op: Operation) -> bool:
    """Return whether an op is to compute in float in a file."""
    return creation.has_mark(op, _IN_FLOAT)


_UNROLL = Words(
    "Model.unroll(), once the model is opened with geutil.model.open",
    key="Model.unroll()",
)
_SMALL = 64
"""Constants of so many values are compared by them."""


def find_twins(ops: Iterable[Operation]) -> list[list[Operation]]:
    """Return groups of ops that have the same type, attributes and inputs."""
    # Inputs are the same, too, if twins make them. Placeholders, variables and what has
    # state have no twins.
    groups: dict[Any, list[Operation]] = {}
    first: dict[Operation, Operation] = {}
    for op in ops:
        if _has_its_own_value(op):
            continue
        node = op.node_def
        node.name = ""
        del node.input[:]
        node.attr.pop("_class", None)
        inputs = tuple(_identity(t, first) for t in op.inputs)
        key = node.SerializeToString(deterministic=True), inputs
        group = groups.setdefault(key, [])
        group.append(op)
        first[op] = group[0]
    return [group for group in groups.values() if len(group) > 1]


def _has_its_own_value(op: Operation) -> bool:
    """Return whether an op of the same kind and inputs may yield something else."""
    if op.type == "ReadVariableOp":
        return False
    return types.is_stateful(op) or (not op.inputs and op.type != "Const")


def _identity(tensor: Tensor, first: dict[Operation, Operation]) -> Any:
    is_constant = tensor.op.type == "Const" and tensor.dtype != tf.string
    if is_constant and (tensor.shape.num_elements() or 0) <= _SMALL:
        value = tf.get_static_value(tensor)
        return tensor.dtype.name, value.shape, value.tobytes()
    return first.get(tensor.op, tensor.op).name, tensor.value_index


_READS = frozenset(("Identity", "ReadVariableOp"))
# Ops that forward values, and those that choose while quantization is delayed.
_AROUND = int8_kernels.PASSING | op_types.SELECTS


def source_of(weights: Tensor) -> Tensor:
    """Return the source of weights: a constant, or the handle of a variable."""
    # Of weights that are computed, these.
    tensor = weights
    while tensor.op.type in _READS and len(tensor.op.inputs) == 1:
        tensor = tensor.op.inputs[0]
    return tensor


def forwarded_from(tensor: Tensor) -> Tensor:
    """Return where values come from that other ops only forward."""
    while True:
        op = tensor.op
        index = 0 if op.type in int8_kernels.PASSING else neutral_input(op)
        if index is None:
            return tensor
        tensor = op.inputs[index]


def is_quantized(weights: Tensor) -> bool:
    """Return whether weights come from a FakeQuant op."""
    return simulation_of(weights) is not None


def simulation_of(weights: Tensor) -> Operation | None:
    """Return the FakeQuant op that weights come from; None if they come from none."""

    def before(op: Operation) -> list[Operation]:
        return [t.op for t in op.inputs] if op.type in _AROUND else []

    sources = walk([weights.op], before)
    return next((op for op in sources if op.type in int8_kernels.FAKE_QUANT), None)


def live_simulations(graph: Graph) -> list[Operation]:
    """Return the FakeQuant ops of a graph, but for those that rewrites retired."""
    live, kinds = Liveness(graph), int8_kernels.FAKE_QUANT
    simulations = (op for op in graph.get_operations() if op.type in kinds)
    return [op for op in simulations if not live.is_retired(op)]


@dataclass(frozen=True, eq=False)
class RandomLayer:
    """Dropout, stochastic depth or noise, which at inference forwards its input."""

    end: Operation  # the op that makes the result
    source: Tensor
    ops: tuple[Operation, ...]  # all ops of the layer, the end among them


def find_random_layers(
    ops: Sequence[Operation], noise: set[Operation]
) -> dict[Operation, RandomLayer]:
    """Return the outermost random layers among ops by their ends."""
    if not noise:
        return {}
    layers: dict[Operation, RandomLayer] = {}
    inside: set[Operation] = set()
    rules = (*dropout_removal(), *noise_removal())
    matches = [
        (m, rule) for rule in rules for m in match(ops, rule.pattern, overlaps=True)
    ]
    place = {op: index for index, op in enumerate(ops)}
    # The last roots come first, so that the outermost of nested layers is found.
    for m, rule in sorted(matches, key=lambda found: -place[found[0].root]):
        if m.root in inside or rule.objection(m) is not None:
            continue
        layers[m.root] = RandomLayer(m.root, m["x"], m.ops)
        inside.update(m.ops)
    return layers


def noise_ops(ops: Iterable[Operation], origins: Origins) -> set[Operation]:
    """Return the ops that compute with random numbers, and with no data."""
    # A layer's result on random numbers counts as data: they are the network's input.
    noise: set[Operation] = set()
    for op in ops:
        if op.type in DATA_SLOTS:
            continue
        draws = op_types.is_random(op.type)
        if not draws and not any(t.op in noise for t in op.inputs):
            continue
        # Integers are seeds, shapes and places, unless integers are made of them.
        counts = not draws and any(t.dtype.is_integer for t in op.outputs)
        sources = [
            t for t in op.inputs if counts or t.dtype.is_floating or t.dtype.is_bool
        ]
        if (draws or any(t.op in noise for t in sources)) and all(
            t.op in noise or origins.is_parameter(t) for t in sources
        ):
            noise.add(op)
    return noise


_FLOW = frozenset(
    ("Case", "If", "StatelessCase", "StatelessIf", "StatelessWhile", "While")
)
BODIES = op_types.CALLS | _FLOW
"""Types of ops that compute in the body of a function."""


class Edge(NamedTuple):
    """Input `slot` of `op`."""

    op: Operation
    slot: int


class Network:
    """The ops of a graph that compute with data."""

    # Neither ops that only make statistics for batch norms in training count, nor ops
    # that rewrites retired.
    # `results`: its results, as far as they are known; without them every op without
    # readers may be one.

    def __init__(self, graph: Graph, results: Iterable[Tensor]) -> None:
        self.origins = Origins(graph)
        self.live = Liveness(graph)
        self.results: IdentitySet = IdentitySet(results)
        all_ops = adjacency.topological_sort(replicas.own_operations(graph))
        # The ops that compute with random numbers, and with no data.
        self.noise = noise_ops(all_ops, self.origins)
        # Dropout and noise by their ends.
        self.random_layers = find_random_layers(all_ops, self.noise)
        needed = self._needed(all_ops)
        # The ops, in topological order.
        self.ops = [op for op in all_ops if op in needed]
        self.place = {op: index for index, op in enumerate(self.ops)}
        candidate_layers = ((op, layer_of(op, self.origins)) for op in self.ops)
        layers = {op: layer for op, layer in candidate_layers if layer is not None}
        # Layers with float kernels are not quantized, but mark the region as others do.
        # Those of them that multiply data by weights, and have int8 kernels.
        self.layers: dict[Operation, Layer] = {
            op: layer
            for op, layer in layers.items()
            if op.type not in int8_kernels.FLOAT_LAYERS
        }
        # Ops that could, and read constants and variables only.
        self.unfed = [
            op
            for op in all_ops
            if op.type in DATA_SLOTS and all(map(self.is_parameter, op.inputs))
        ]
        self._region = None if self.results else self._before(layers)
        self._losses: set[Operation] | None = None

    def is_input(self, op: Operation) -> bool:
        """Return whether an op is an input, or a constant that stands in for one."""
        return op.type in op_types.PLACEHOLDERS or op in self.origins.inputs

    def is_data(self, tensor: Tensor) -> bool:
        """Return whether a tensor is data, no parameter and no statistic."""
        is_data = self.origins.of(tensor) is None or tensor.op in self.noise
        return is_data and tensor.dtype.is_floating

    def is_parameter(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on constants and variables only."""
        return tensor.dtype.is_floating and (
            self.origins.is_parameter(tensor) and tensor.op not in self.noise
        )

    def is_statistic(self, tensor: Tensor) -> bool:
        """Return whether a tensor is made of statistics of the batch."""
        return self.origins.of(tensor) is Origin.BATCH

    def readers(self, tensor: Tensor) -> list[Edge]:
        """Return who reads the values of a tensor, statistics left out."""
        readers = {op for op in tensor.consumers() if op in self.place}
        return [
            Edge(op, index)
            for op in sorted(readers, key=self.place.__getitem__)
            for index, t in enumerate(op.inputs)
            if t is tensor and op.type not in op_types.VALUE_BLIND
        ]

    def quantized(self, tensor: Tensor) -> Tensor | None:
        """Return the result of a FakeQuant op that reads a tensor, or is the tensor."""
        if tensor.op.type in int8_kernels.FAKE_QUANT:
            return tensor
        for op in tensor.consumers():
            if op.type in int8_kernels.FAKE_QUANT and not self.live.is_retired(op):
                return op.outputs[0]
        return None

    def is_quantized_behind(self, tensor: Tensor) -> bool:
        """Return whether all ops that a tensor's values reach quantize it."""
        # A Reshape may stand between it and the FakeQuant op, for example.
        waiting = [tensor]
        for passed in waiting:
            edges = self.readers(passed)
            if passed in self.results or not edges:
                return False
            for op, index in edges:
                kernel = kernel_of(op)
                if kernel is None or index not in kernel.data_inputs(op):
                    return False
                if kernel.treatment is Treatment.PASSES:
                    forwarded = [op.outputs[index if len(op.outputs) > 1 else 0]]
                elif op.type in int8_kernels.MOVING:
                    forwarded = [t for t in op.outputs if t.dtype.is_floating]
                else:
                    return False
                waiting += [t for t in forwarded if self.quantized(t) is None]
        return True

    def is_behind_layers(self, op: Operation) -> bool:
        """Return whether an op may be part of a loss."""
        # Of graphs whose results are not known that is what no layer depends on.
        return self._region is not None and op not in self._region

    def leads_to_loss(self, op: Operation) -> bool:
        """Return whether an op behind the last layer looks like part of a loss."""
        # That is, if what depends on it ends in a single number, or meets data that no
        # layer sees: the labels.
        if self._losses is None:
            self._losses = self._before_losses()
        return op in self._losses

    def fills_lists(self, op: Operation) -> bool:
        """Return whether an op runs a body that computes floats, and returns lists."""
        # As the loop of `tf.map_fn` does. What the lists hold the graph does not say.
        if op.type not in BODIES or all(t.dtype != tf.variant for t in op.outputs):
            return False
        names = function_calls.called_names([op.node_def])
        bodies = (function_calls.definition_in(op.graph, name) for name in names)
        return any(
            node.op in int8_kernels.KERNELS
            and node.op not in int8_kernels.PASSING
            and node.attr["T"].type == tf.float32.as_datatype_enum
            for body in bodies
            if body is not None
            for node in body.node_def
        )

    def obstacle(self, op: Operation) -> str:
        """Return why FakeQuant ops cannot stand behind an op; "" if they can."""
        if v1_control_flow.is_inside(op):
            return "is in a loop or conditional of version 1, where ranges are not kept"
        if function_calls.called_function(op):
            reason = function_calls.reason_to_stay(op)
            if reason:
                return (
                    "calls a function, whose body is not looked into, and which "
                    f"geutil.model.open leaves a call: {reason}; open a model that was "
                    "traced without that"
                )
            return (
                "calls a function, whose body is not looked into; geutil.model.open "
                "inlines it"
            )
        if op.type in op_types.LOOPS:
            return (
                "runs bodies that are not looked into, in float; unroll it with "
                f"{_UNROLL}"
            )
        if op.type in _FLOW:
            return (
                "runs bodies that are not looked into; choose a branch before the "
                "model is opened with geutil.model.open"
            )
        kinds = {t.dtype for t in op.outputs if t.dtype.is_floating}
        if kinds - {tf.float32}:
            names = sorted(kind.name for kind in kinds)
            return f"computes in {names[0]}, and FakeQuant ops take float32 only"
        return ""

    def _needed(self, ordered: list[Operation]) -> set[Operation]:
        needed: set[Operation] = set()
        ends = {t.op for t in self.results}
        for op in reversed(ordered):
            if op in ends or self._is_needed(op, needed, bool(ends)):
                needed.add(op)
        return needed

    def _is_needed(
        self, op: Operation, needed: set[Operation], ends_known: bool
    ) -> bool:
        if self.live.is_retired(op) or not op.outputs:
            return False
        if all(self.origins.of(t) is not None for t in op.outputs):
            return False
        readers = self.live.readers(op)
        if not readers and not ends_known:
            return any(self._may_be_result(t) for t in op.outputs)
        return any(r in needed and _reads_values(r, op) for r in readers)

    def _may_be_result(self, tensor: Tensor) -> bool:
        """Return whether an unread tensor may be a result: numbers, or choices."""
        op = tensor.op
        # An assignment to a version 1 variable returns it.
        if is_reference(tensor) or self.origins.of(tensor) is not None:
            return False
        chosen = (tensor.dtype.is_integer or tensor.dtype.is_bool) and op.inputs
        return tensor.dtype.is_floating or (
            bool(chosen) and op.type not in op_types.VALUE_BLIND
        )

    def _before(self, layers: Mapping[Operation, Layer]) -> set[Operation]:
        region: set[Operation] = set()
        for op in reversed(self.ops):
            if op in layers or any(r in region for r in self.live.readers(op)):
                region.add(op)
        return region

    def _before_losses(self) -> set[Operation]:
        """Return the ops behind the last layers that lead to a loss."""
        region = self._region or set()
        behind = [op for op in self.ops if op not in region]
        reached_ops = set(region)
        loss_ops: set[Operation] = set()
        for op in behind:
            data = {t.op for t in op.inputs if self.origins.of(t) is None}
            if reached_ops.isdisjoint(data):
                continue
            reached_ops.add(op)
            numbers = (t for t in op.outputs if t.dtype.is_floating)
            # A loss meets data that no layer sees, its labels, or ends in a scalar.
            if not reached_ops.issuperset(data) or any(
                t.shape.rank == 0 for t in numbers
            ):
                loss_ops.add(op)
        for op in reversed(behind):
            readers = (
                r for r in self.live.readers(op) if r.type not in op_types.VALUE_BLIND
            )
            if not loss_ops.isdisjoint(readers):
                loss_ops.add(op)
        return loss_ops


def _reads_values(reader: Operation, op: Operation) -> bool:
    """Return whether an op reads another's values, and not just the range of them."""
    return reader.type not in int8_kernels.FAKE_QUANT or reader.inputs[0].op is op


def refuse_mesh(graph: Graph) -> None:
    """Raise QuantizeError for a function that reads variables of a DTensor mesh."""
    if runtime.is_on_mesh(graph):
        raise QuantizeError(
            "the function reads variables of a DTensor mesh, and DTensor has no layout "
            "for FakeQuant ops; quantize it outside of the mesh, or shard the batch by "
            "tf.distribute"
        )


def refuse_training_ops(graph: Graph) -> None:
    """Raise QuantizeError for a graph that holds gradients or optimizer ops."""
    refused_ops = training_ops(graph)
    if refused_ops:
        raise QuantizeError(
            f"'{refused_ops[0].name}' ({refused_ops[0].type}) belongs to gradients or "
            "an optimizer; insert quantization before gradients, into a graph that "
            "has none"
        )
    if replicas.outputs_meant(graph):
        _refuse_gradients_of_outputs(graph)


def _refuse_gradients_of_outputs(graph: Graph) -> None:
    own = frozenset(replicas.own_operations(graph))
    origins = Origins(graph)
    for op in training_ops(graph, graph.get_operations()):
        for t in op.inputs:
            is_input = t.op.type in op_types.PLACEHOLDERS or origins.is_parameter(t)
            if t.op in own and t.dtype.is_floating and not is_input:
                raise QuantizeError(
                    f"'{op.name}' ({op.type}) belongs to gradients and reads "
                    f"'{t.name}', which the outputs depend on; insert quantization "
                    "before gradients"
                )


@dataclass(frozen=True, eq=False)
class Moved:
    """A convolution between two moves, which only such read the inside of."""

    # SpaceToBatch forwards every n-th row and column as an image of its own, an
    # ordinary convolution follows, with or without a bias, and BatchToSpace puts the
    # rows and columns back.

    spread: Operation  # the SpaceToBatchND before it
    convolution: Operation
    gathered: Operation  # the BatchToSpaceND behind it
    # The axis of size 1 that a convolution along one axis is given in between; None for
    # two.
    axis: int | None

    @property
    def numbers(self) -> list[Tensor]:
        """Blocks and paddings of the first move, then blocks and crops of the last."""
        return [*list(self.spread.inputs)[1:], *list(self.gathered.inputs)[1:]]


def find_moved(ops: Iterable[Operation], live: Liveness) -> Iterator[Moved]:
    """Yield the convolutions between moves that can be written as dilated ones."""
    for op in ops:
        if op.type == "SpaceToBatchND" and not live.is_retired(op):
            # Folded for training, a layer runs twice on what is spread once.
            candidates = [
                _moved_behind(op, reader, live) for reader in live.readers(op)
            ]
            moved_convolutions = [
                m for m in candidates if m is not None and not _crops_data(m)
            ]
            if len(moved_convolutions) == len(candidates):
                yield from moved_convolutions


def _moved_behind(spread: Operation, reader: Operation, live: Liveness) -> Moved | None:
    """Return a dilated convolution, from SpaceToBatchND on; None if it is none."""
    middle, axis = reader, None
    # A convolution of one dimension runs as one of two, with an axis of size 1.
    if middle.type == "ExpandDims":
        axis = _positive(tf.get_static_value(middle.inputs[1]))
        middle = _only_reader(middle, live) if axis in (1, 2) else None
    if middle is None or not _is_plain(middle):
        return None
    end = _only_reader(middle, live)
    if end is not None and end.type == "BiasAdd":
        end = _only_reader(end, live)
    if end is not None and axis is not None:
        removed = end.get_attr("squeeze_dims") if end.type == "Squeeze" else []
        removes = [_positive(index) for index in removed] == [axis]
        end = _only_reader(end, live) if removes else None
    if end is None or end.type != "BatchToSpaceND":
        return None
    return Moved(spread, middle, end, axis)


def _positive(axis: int | None) -> int | None:
    """Return an axis of images counted from the first one."""
    return None if axis is None else int(axis) % 4


def _only_reader(op: Operation, live: Liveness) -> Operation | None:
    readers = tuple(live.readers(op))
    return readers[0] if len(readers) == 1 and len(op.outputs) == 1 else None


def _is_plain(op: Operation) -> bool:
    """Return whether an op is a convolution that looks at each place, without zeros."""
    if op.type not in op_types.CONVOLUTIONS_2D or data_format(op) != "NHWC":
        return False
    ones = {*op.get_attr("strides"), *op.get_attr("dilations")} == {1}
    window = op.inputs[1].shape
    has_known_size = window.rank == 4 and None not in window.as_list()[:2]
    return ones and has_known_size and bool(op.get_attr("padding") == b"VALID")


def _crops_data(moved_convolution: Moved) -> bool:
    """Return whether more is cropped than zeros were added, as far as that is known."""
    before, padding, after, crops = (
        tf.get_static_value(t) for t in moved_convolution.numbers
    )
    if any(value is None for value in (before, padding, after, crops)):
        return False
    return not np.array_equal(before, after) or bool(np.any(padding < crops))
