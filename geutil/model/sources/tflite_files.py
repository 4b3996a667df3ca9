"""Programs of TFLite files: each subgraph walked in its order, op by op.

Integers stand for numbers, `scale * (integer - zero point)`. The numbers of weights
become a variable that can be trained, and a FakeQuant op behind it has the ranges of
the file, in two variables `<name>/min` and `<name>/max`, as `geutil.quantize` has them:
the range of b bits with a zero point z is from scale * (lowest - z) to
scale * (highest - z). The variable lies on the steps of the file at first, so that the
op changes nothing before training does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ModelError, TFLiteError
from geutil.graph.resource_variables import variable_outside
from geutil.model import programs
from geutil.model.programs import ModelProgram, SharedState
from geutil.model.sources.objects import DEFAULT_SIGNATURE, Source, program_of_graph
from geutil.model.sources.tflite_ops import (
    ACTIVATIONS,
    BITS,
    CUSTOM,
    FORWARDING,
    KINDS,
    Builder,
    Call,
    Handle,
    flex,
    has_steps,
)
from geutil.tflite.effects import called_graphs
from geutil.tflite.file import LiteFile
from geutil.tflite.kinds import limits, numbers_of
from geutil.tflite.numbers import dense
from geutil.tflite.parts import (
    FLEX,
    Array,
    LiteGraph,
    LiteOp,
    LiteSignature,
    LiteTensor,
    Quantization,
)

_UNPACKING = frozenset(("DENSIFY", "DEQUANTIZE"))


def source_of_lite(file: LiteFile) -> Source:
    """Return a TFLite file as a source: one program for each signature."""
    what = "the TFLite file" if file.path is None else f"TFLite file '{file.path}'"
    entries = _entries(file)
    _refuse_unknown(what, entries)
    model = _Model(what)
    built = {name: model.program(entry) for name, entry in entries.items()}
    holdings = SharedState()
    holdings.add_variables(model.variables.all.values(), model.variables.all)
    return Source(
        what, {name: partial(built.__getitem__, name) for name in built}, holdings
    )


def tflite_kinds() -> tuple[str, ...]:
    """Return the kinds of ops that `from_tflite` accepts, by their schema names.

    It also accepts TensorFlow ops ("Flex..."), and MediaPipe's custom op
    `Convolution2DTransposeBias`.

    Cost: linear in the kinds.

    Example:
        >>> from geutil import model
        >>> "CONV_2D" in model.tflite_kinds(), "SVDF" in model.tflite_kinds()
        (True, False)
    """
    return tuple(sorted((*KINDS, *RECURRENT)))


def _entries(file: LiteFile) -> dict[str, LiteSignature]:
    """Return the signatures of a file, or one for each subgraph that no op calls."""
    if file.signatures:
        return dict(file.signatures)
    called = {graph for op in file.ops for graph in op.subgraphs}
    mains = [g for g in file.graphs if g not in called] or file.graphs[:1]
    entries: dict[str, LiteSignature] = {}
    for graph in mains:
        wanted = DEFAULT_SIGNATURE if graph is file.graphs[0] else graph.name or "graph"
        name = programs.fresh_name(entries, wanted)
        inputs, outputs = _public(graph.inputs), _public(graph.outputs)
        entries[name] = LiteSignature(name, graph, inputs, outputs)
    return entries


def _public(tensors: Iterable[LiteTensor]) -> dict[str, LiteTensor]:
    named: dict[str, LiteTensor] = {}
    for tensor in tensors:
        named[programs.fresh_name(named, _plain_name(tensor))] = tensor
    return named


def _plain_name(tensor: LiteTensor) -> str:
    """Return the name of the op that a tensor is named after, fit for TensorFlow."""
    first = tensor.name.partition(";")[0].partition(":")[0].strip("/ ")
    return programs.legal_name(first or "tensor")


def _builder(op: LiteOp) -> Builder | None:
    if op.is_custom:
        return flex if op.kind.startswith(FLEX) else CUSTOM.get(op.kind)
    return KINDS.get(op.kind) or RECURRENT.get(op.kind)


def _refuse_unknown(what: str, entries: Mapping[str, LiteSignature]) -> None:
    """Raise if some op that a signature needs has no ops of TensorFlow."""
    graphs = dict.fromkeys(entry.graph for entry in entries.values())
    graphs |= dict.fromkeys(called_graphs(op for g in graphs for op in g.ops))
    unknown: dict[str, list[LiteOp]] = {}
    for op in (op for graph in graphs for op in graph.ops if _builder(op) is None):
        unknown.setdefault(op.kind, []).append(op)
    if not unknown:
        return
    told = "; ".join(
        f"{len(ops)} {'custom ' if ops[0].is_custom else ''}op(s) {kind}, {ops[0]!r} "
        "first"
        for kind, ops in unknown.items()
    )
    raise ModelError(
        f"{what} holds ops that TensorFlow has none for: {told}; cut them off first: "
        "LiteFile.cut(outputs=[...]) keeps what lies before tensors, and "
        "LiteFile.cut(inputs=[...]) what lies behind them"
    )


class _Model:
    """The model that is built of a file."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.variables = Variables()
        self.running: list[LiteGraph] = []
        # The names that ops are to get, by the names that they have.
        self.names: dict[str, str] = {}
        self.graph: Any = None
        self._states: dict[str, tf.Variable] = {}
        self._initialized: set[int] = set()

    def program(self, entry: LiteSignature) -> ModelProgram:
        """Return the program of a signature."""
        inputs = entry.inputs or _public(entry.graph.inputs)
        outputs = entry.outputs or _public(entry.graph.outputs)
        given = [*inputs.values()]
        self.names = {}

        def traced(*arguments: Any) -> dict[str, Any]:
            self.graph = tf.compat.v1.get_default_graph()
            by_tensor = dict(zip(map(id, given), arguments, strict=True))
            values = [by_tensor[id(t)] for t in entry.graph.inputs]
            results = _Subgraph(self, entry.graph, True).run(values)
            place = {
                id(t): value
                for t, value in zip(entry.graph.outputs, results, strict=True)
            }
            return {name: place[id(t)] for name, t in outputs.items()}

        try:
            specs = [
                tf.TensorSpec(t.shape, dtype_of(t), programs.legal_name(name))
                for name, t in inputs.items()
            ]
            function = tf.function(traced, autograph=False)
            made = function.get_concrete_function(*specs)
        except TFLiteError as error:
            raise ModelError(f"{self._what}: {error}") from error
        except Exception as error:
            # Placeholders of damaged shapes raise it, and results of loops.
            said = str(error).partition("\n")[0]
            raise ModelError(
                f"{self._what} cannot be computed by TensorFlow: {said}"
            ) from error
        graph = made.graph
        arguments = graph.inputs[: len(specs)]
        program = program_of_graph(
            graph,
            dict(zip(inputs, arguments, strict=True)),
            # Functions flatten dictionaries by sorted key.
            dict(zip(sorted(outputs), graph.outputs, strict=True)),
        )
        program.outputs = {name: program.outputs[name] for name in outputs}
        self._rename(program)
        return program

    def _rename(self, program: ModelProgram) -> None:
        """Call the ops of a program as the file calls their results."""
        nodes = programs.nodes_by_name(program.graph_def)
        counts = {
            name: max(len(nodes[name].attr["_output_shapes"].list.shape), 1)
            if "_output_shapes" in nodes[name].attr
            else 1
            for name in self.names
            if name in nodes
        }
        used = set(nodes)
        new = {}
        for old, wanted in self.names.items():
            if old in nodes and old != wanted:
                new[old] = programs.take_name(used, wanted)
        programs.rename_nodes(program, new, counts)

    def state(self, handle: Handle, like: LiteTensor) -> tf.Variable:
        """Return the variable of a handle, made of zeros if nothing has set it."""
        if handle.name not in self._states:
            sizes = [1 if size is None else size for size in like.shape or ()]
            name = programs.legal_name(handle.name)
            with tf.init_scope():
                zeros = tf.zeros(sizes, dtype_of(like))
            made = self.variables.new(name, zeros, trained=False)
            self._states[handle.name] = made
        return self._states[handle.name]

    def initialize(self, graph: LiteGraph) -> None:
        """Run a subgraph that sets variables, unless it was run before."""
        if id(graph) in self._initialized:
            return
        self._initialized.add(id(graph))
        with tf.init_scope():
            _Subgraph(self, graph, False).run(())


class _Subgraph:
    """One run of a subgraph of a file: the value of each of its tensors."""

    def __init__(self, model: _Model, graph: LiteGraph, trains: bool) -> None:
        self._model = model
        self.variable, self.initialize = model.state, model.initialize
        self._graph = graph
        self._trains = trains
        self._values: dict[int, Any] = {}
        self._made: dict[Any, Any] = {}
        self._op_name = ""

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Return the outputs of the subgraph for values."""
        # A subgraph that calls itself would be built without end.
        if any(graph is self._graph for graph in self._model.running):
            raise TFLiteError(f"subgraph '{self._graph.name}' calls itself")
        self._model.running.append(self._graph)
        try:
            for tensor, value in zip(self._graph.inputs, values, strict=True):
                self._values[id(tensor)] = value
            self._round_inputs()
            for op in self._graph.ops:
                self._build(op)
            self._op_name = (
                _plain_name(self._graph.outputs[0]) if self._graph.outputs else ""
            )
            return [self.tensor(t, False) for t in self._graph.outputs]
        finally:
            self._model.running.pop()

    def _round_inputs(self) -> None:
        """Round the inputs of a model; those of subgraphs are rounded already."""
        if len(self._model.running) > 1 or not self._trains:
            return
        for tensor in self._graph.inputs:
            if has_steps(tensor):
                value = self._values[id(tensor)]
                scope = f"{value.op.name}/input_quant"
                rounded = self._model.variables.rounded(value, tensor, scope)
                self._values[id(tensor)] = rounded

    def _build(self, op: LiteOp) -> None:
        """Make the ops of TensorFlow for an op of the file."""
        if op.kind in _UNPACKING and op.inputs[0] is not None:
            source, result = self.value(op.inputs[0]), op.outputs[0]
            if isinstance(source, Constant) and not has_steps(result):
                # A constant that is unpacked is a constant.
                unpacked = Constant(result, source.stored, dtype_of(result))
                self._values[id(result)] = unpacked
                return
        build = _builder(op)
        name = _plain_name(op.outputs[0]) if op.outputs else op.kind.lower()
        self._op_name = name
        try:
            if build is None:
                raise TFLiteError(f"TensorFlow has no ops for the kind {op.kind}")
            with tf.name_scope(f"{name}/"):
                made = build(Call(op, self))
        except TFLiteError as error:
            raise TFLiteError(f"{op.kind} '{name}': {error}") from error
        except Exception as error:
            # Shape functions raise it, or Python, of options that no converter writes.
            said = str(error).partition("\n")[0] or type(error).__name__
            raise TFLiteError(
                f"{op.kind} '{name}' is not one that TensorFlow can compute: {said}"
            ) from error
        results = made if isinstance(made, list | tuple) else [made]
        for tensor, result in zip(op.outputs, results, strict=False):
            self._values[id(tensor)] = self._finished(op, tensor, result)

    def _finished(self, op: LiteOp, tensor: LiteTensor, result: Any) -> Any:
        """Return a result under its name, and rounded to the steps of the file."""
        if not tf.is_tensor(result):
            return result
        if self._trains and result.graph is self._model.graph:
            # The op of the result is to have the name that the file has for it.
            name = _plain_name(tensor)
            if result.op.name.startswith(f"{name}/"):
                self._model.names.setdefault(result.op.name, name)
        if not has_steps(tensor) or not result.dtype.is_floating:
            return result
        sources = (t for t in op.inputs if t is not None)
        if op.kind in FORWARDING and any(same_steps(t, tensor) for t in sources):
            return result
        scope = f"{_plain_name(tensor)}/act_quant"
        return self._model.variables.rounded(result, tensor, scope)

    def value(self, source: LiteTensor) -> Any:
        """Return whatever stands for a tensor of the file."""
        if id(source) not in self._values:
            if source.producer is not None or (
                source.buffer.data is None and 0 not in source.sizes
            ):
                raise TFLiteError(f"'{source.name}' is read before anything makes it")
            self._values[id(source)] = Constant(source, source, dtype_of(source))
        return self._values[id(source)]

    def tensor(self, source: LiteTensor, learned: bool) -> Any:
        """Return the tensor of TensorFlow for one of the file."""
        value = self.value(source)
        if not isinstance(value, Constant):
            return value
        return self._read(value, plain(len(value.stored.sizes)), learned)

    def weights(
        self, source: LiteTensor, order: Sequence[int], shape: Sequence[int] | None
    ) -> Any:
        """Return the tensor for weights, whose axes are put in another order."""
        layout = Layout(tuple(order), None if shape is None else tuple(shape))
        value = self.value(source)
        if not isinstance(value, Constant):
            return layout.of(value)
        return self._read(value, layout, True, of_layer=True)

    def _read(
        self,
        constant: Constant,
        layout: Layout,
        learned: bool,
        *,
        of_layer: bool = False,
    ) -> Any:
        """Return the tensor of a constant: read from a variable if it is trained."""
        key = id(constant.tensor), layout, learned
        if key in self._made:
            return self._made[key]
        trained = (
            learned
            and self._trains
            and constant.dtype.is_floating
            and (of_layer or np.prod(constant.stored.sizes) > 1)
        )
        name = _plain_name(constant.tensor)
        with tf.name_scope(f"{name}/read/"):
            if trained:
                made = self._model.variables.weights(constant, name, layout)
            else:
                made = tf.constant(layout.of(constant.numbers(), np), constant.dtype)
        if constant.is_rounded and self._trains:
            scope = f"{self._op_name}/weights_quant"
            made = self._model.variables.rounded(made, constant, scope, layout)
        self._made[key] = made
        return made

    def results_of(self, graph: LiteGraph, values: Sequence[Any]) -> list[Any]:
        """Return the results of another subgraph."""
        return _Subgraph(self._model, graph, self._trains).run(values)


_EPSILON = 1e-8
"""Added to variances: that of TFLite's kernel (`tensor_utils.h`)."""
_GATES = ("input", "forget", "cell", "output")
# The places of an LSTM's inputs, in the order of the gates.
_FROM_INPUT, _FROM_STATE, _BIASES, _NORMS = 1, 5, 12, 20
_PEEPHOLES = {"input": 9, "forget": 10, "output": 11}
# Inputs 16 and 17 of the LSTM kernel: the projection and its bias (lstm.cc).
_PROJECTION = 16


def _matrix(call: Call, place: int) -> Any:
    return call.weights(place, [1, 0])


def _vector(call: Call, place: int) -> Any:
    return call.weights(place, [0])


def _by_time(call: Call, x: Any) -> Any:
    """Return a sequence with time as its first dimension, or the reverse."""
    return x if call.option("time_major", False) else tf.transpose(x, [1, 0, 2])


def _refuse_integers(call: Call) -> None:
    if call.source(0).quantization is not None:
        raise TFLiteError(
            "it computes in integers, with ranges inside that no tensor has; convert "
            "its model with float or dynamic-range recurrent layers"
        )


def _scanned(
    step: Callable[[Any, Sequence[Any]], Sequence[Any]],
    rows: Sequence[Any],
    state: Sequence[Any],
) -> Any:
    """Return the first part of a state after each step, stacked."""
    count = tf.shape(rows[0])[0]
    known = rows[0].shape[0]
    results = tf.TensorArray(
        tf.float32, known or count, element_shape=state[0].shape, dynamic_size=False
    )

    def body(time: Any, made: Any, *before: Any) -> Any:
        after = step([tf.gather(row, time) for row in rows], before)
        return (time + 1, made.write(time, after[0]), *after)

    _, results, *_ = tf.while_loop(
        lambda time, *_: time < (known or count), body, (0, results, *state)
    )
    stacked = results.stack()
    stacked.set_shape([known, *state[0].shape])
    return stacked


def _lstm(call: Call) -> Any:
    """Return the outputs of a layer of long short-term memory for each time."""
    _refuse_integers(call)
    if call.option("diagonal_recurrent_tensors", False):
        raise TFLiteError("its recurrent weights are diagonal")
    x = _by_time(call, call[0])
    gates = [gate for i, gate in enumerate(_GATES) if call.has(_FROM_INPUT + i)]
    place = {gate: _GATES.index(gate) for gate in gates}
    from_input = [tf.matmul(x, _matrix(call, _FROM_INPUT + place[g])) for g in gates]
    from_state = {g: _matrix(call, _FROM_STATE + place[g]) for g in gates}
    biases = {g: _vector(call, _BIASES + place[g]) for g in gates}
    norms = {
        g: _vector(call, _NORMS + place[g])
        for g in gates
        if call.has(_NORMS + place[g])
    }
    peepholes = {g: _vector(call, i) for g, i in _PEEPHOLES.items() if call.has(i)}
    projection = _matrix(call, _PROJECTION) if call.has(_PROJECTION) else None
    shift = _vector(call, _PROJECTION + 1) if call.has(_PROJECTION + 1) else None
    function = ACTIVATIONS[call.option("fused_activation_function", "TANH")]
    cell_clip, clip = call.option("cell_clip", 0.0), call.option("proj_clip", 0.0)

    def before(gate: str, given: Any, state: Any, cell: Any) -> Any:
        total = given + tf.matmul(state, from_state[gate])
        if gate in peepholes:
            total += cell * peepholes[gate]
        if gate in norms:
            mean, variance = tf.nn.moments(total, [-1], keepdims=True)
            total = (total - mean) * tf.math.rsqrt(variance + _EPSILON) * norms[gate]
        # The kernel adds the bias behind the normalization.
        return total + biases[gate]

    def step(rows: Any, states: Sequence[Any]) -> Sequence[Any]:
        """Compute the state and the cell behind one row, as in kernels/lstm_eval.cc."""
        state, cell = states
        given = dict(zip(gates, rows, strict=True))
        forget = tf.sigmoid(before("forget", given["forget"], state, cell))
        # A layer without an input gate couples it to the forget gate.
        taken = (
            tf.sigmoid(before("input", given["input"], state, cell))
            if "input" in given
            else 1.0 - forget
        )
        new = function(before("cell", given["cell"], state, cell))
        cell = _clipped(forget * cell + taken * new, cell_clip)
        output = tf.sigmoid(before("output", given["output"], state, cell))
        state = output * function(cell)
        if projection is not None:
            state = tf.matmul(state, projection)
            state = _clipped(state if shift is None else state + shift, clip)
        return state, cell

    batch = x.shape[1] or tf.shape(x)[1]
    units = from_state["cell"].shape[1]
    width = units if projection is None else projection.shape[1]
    state = [tf.zeros([batch, width]), tf.zeros([batch, units])]
    return _by_time(call, _scanned(step, from_input, state))


def _clipped(x: Any, limit: float) -> Any:
    return tf.clip_by_value(x, -limit, limit) if limit > 0.0 else x


def _rnn(call: Call) -> Any:
    """Return the outputs of a simple recurrent layer for each time."""
    _refuse_integers(call)
    x = _by_time(call, call[0])
    recurrent, bias = _matrix(call, 2), _vector(call, 3)
    function = ACTIVATIONS[call.option("fused_activation_function", "NONE")]
    given = tf.matmul(x, _matrix(call, 1)) + bias

    def step(rows: Any, states: Sequence[Any]) -> Sequence[Any]:
        return [function(rows[0] + tf.matmul(states[0], recurrent))]

    batch = x.shape[1] or tf.shape(x)[1]
    state = tf.zeros([batch, recurrent.shape[1]])
    return _by_time(call, _scanned(step, [given], [state]))


RECURRENT: Mapping[str, Builder] = {
    "UNIDIRECTIONAL_SEQUENCE_LSTM": _lstm,
    "UNIDIRECTIONAL_SEQUENCE_RNN": _rnn,
}
"""The builders for recurrent kinds."""


# Activations of 16 bits have the zero point 0 (quantization specification of TFLite).
_SYMMETRIC = 16
_FROM_STEPS = frozenset((*BITS, "int32", "int64"))
"""Types of constants with steps: those of biases are too fine to be rounded to."""


@dataclass(frozen=True, eq=False)
class Constant:
    """A constant of a file, as numbers."""

    tensor: LiteTensor
    stored: LiteTensor
    dtype: tf.DType

    @property
    def steps(self) -> Quantization | None:
        """The steps of the integers that are stored; None of floats."""
        return self.stored.quantization

    @property
    def is_rounded(self) -> bool:
        """True if training has to round it to steps in the bits of a kernel."""
        return has_steps(self.stored)

    def numbers(self) -> Array:
        """Return its values as numbers."""
        value = dense(self.stored)
        if value is None:
            raise TFLiteError(f"constant '{self.tensor.name}' has no values")
        if self.steps is None:
            is_text = value.dtype == object
            return value if is_text else value.astype(self.dtype.as_numpy_dtype)
        if self.stored.dtype not in _FROM_STEPS:
            raise TFLiteError(
                f"constant '{self.tensor.name}' has steps and is of type "
                f"{self.stored.dtype}"
            )
        return numbers_of(value, self.steps)

    def lowest(self) -> int:
        """Return the lowest integer that is stored."""
        value = dense(self.stored)
        return 0 if value is None or not value.size else int(value.min())


def dtype_of(tensor: LiteTensor) -> tf.DType:
    """Return the type of the numbers of a tensor."""
    if tensor.quantization is not None and tensor.dtype in _FROM_STEPS:
        return tf.float32
    if tensor.dtype in ("int2", "uint4"):
        return tf.int8
    try:
        return tf.as_dtype(tensor.dtype)
    except TypeError as error:
        raise TFLiteError(
            f"'{tensor.name}' is of type {tensor.dtype}, which TensorFlow lacks"
        ) from error


def same_steps(one: LiteTensor, other: LiteTensor) -> bool:
    """Return whether the integers of two tensors stand for the same numbers."""
    return one.dtype == other.dtype and one.quantization == other.quantization


@dataclass(frozen=True)
class Layout:
    """The layout of weights in TensorFlow's kernels: order of axes, and shape."""

    order: tuple[int, ...]
    shape: tuple[int, ...] | None = None

    def of(self, value: Any, on: Any = tf) -> Any:
        """Return values in this layout."""
        if self.order != tuple(range(len(self.order))):
            value = on.transpose(value, self.order)
        return value if self.shape is None else on.reshape(value, self.shape)

    def back(self, value: Any, sizes: Sequence[int]) -> Any:
        """Return a tensor of this layout as the file has it."""
        if self.shape is not None:
            value = tf.reshape(value, [sizes[axis] for axis in self.order])
        inverse = tuple(int(i) for i in np.argsort(self.order))
        return Layout(inverse).of(value)

    def axes(self, axis: int) -> tuple[int, ...]:
        """Return the axes of this layout that an axis of the file's becomes."""
        place, last = self.order.index(axis), len(self.order) - 1
        # With a shape, the filters of all channels are told apart by the last two.
        if self.shape is None or len(self.shape) <= last or place < last - 1:
            return (place,)
        return (last - 1, last)


def plain(rank: int) -> Layout:
    """Return the layout of the file."""
    return Layout(tuple(range(rank)))


class Variables:
    """The variables that stand for constants, and those with ranges."""

    def __init__(self) -> None:
        self.all: dict[str, tf.Variable] = {}
        self._weights: dict[Any, tuple[tf.Variable, Layout]] = {}

    def new(self, name: str, value: Any, *, trained: bool) -> tf.Variable:
        """Return a new variable, whose name gets a number where it is taken."""
        free = programs.fresh_name(self.all, name)
        graph = tf.compat.v1.get_default_graph()
        made = variable_outside(graph, value, free, is_trained=trained)
        self.all[free] = made
        return made

    def weights(self, constant: Constant, name: str, layout: Layout) -> Any:
        """Return a constant as it is read from its variable, in a layout."""
        stored = constant.stored
        key = id(stored.buffer), stored.sizes, stored.dtype, stored.quantization
        if key not in self._weights:
            value = layout.of(constant.numbers(), np)
            self._weights[key] = self.new(name, value, trained=True), layout
        variable, own = self._weights[key]
        read = variable.value()
        return read if own == layout else layout.of(own.back(read, stored.sizes))

    def rounded(
        self,
        x: Any,
        like: Constant | LiteTensor,
        scope: str,
        layout: Layout | None = None,
    ) -> Any:
        """Return a tensor behind a FakeQuant op with the ranges of the file."""
        stored = like.stored if isinstance(like, Constant) else like
        steps, bits = stored.quantization, BITS[stored.dtype]
        if steps is None or steps.block:
            return x
        lowest, highest = limits(stored.dtype)
        scales = np.asarray(steps.scales, np.float32)
        zeros = np.asarray(steps.zero_points, np.int64)
        if (zeros < lowest).any() or (zeros > highest).any():
            raise TFLiteError(
                f"'{stored.name}' has a zero point outside {lowest} to {highest}"
            )
        # Kernels ask for weights without the lowest integer, and so do those with
        # activations of 16 bits, which have no zero point.
        narrow = (
            lowest < 0
            and not zeros.any()
            and (
                like.lowest() > lowest
                if isinstance(like, Constant)
                else bits == _SYMMETRIC
            )
        )
        low, high = scales * (lowest + narrow - zeros), scales * (highest - zeros)
        more = {"num_bits": bits, "narrow_range": bool(narrow)}
        with tf.name_scope(f"{scope}/"):
            if layout is None or scales.size == 1:
                ends = self._range(scope, low[0], high[0])
                return tf.quantization.fake_quant_with_min_max_vars(x, *ends, **more)
            axes = layout.axes(steps.axis)
            return _by_channel(x, self._range(scope, low, high), axes, more)

    def _range(self, scope: str, low: Any, high: Any) -> list[Any]:
        ends = []
        with tf.name_scope("range"):
            for end, value in (("min", low), ("max", high)):
                number = np.asarray(value, np.float32)
                made = self.new(f"{scope}/{end}", number, trained=False)
                ends.append(made.value())
        return ends


def _by_channel(x: Any, ends: Sequence[Any], axes: Sequence[int], more: Any) -> Any:
    """Return a tensor rounded in a range for each index of axes that are neighbours.

    FakeQuant ops know the last axis alone.
    """
    fake_quant = tf.quantization.fake_quant_with_min_max_vars_per_channel
    rank, sizes = x.shape.rank, x.shape.as_list()
    if axes[-1] != rank - 1:
        order = [*(i for i in range(rank) if i not in axes), *axes]
        turned = _by_channel(
            tf.transpose(x, order), ends, range(rank - len(axes), rank), more
        )
        return tf.transpose(turned, [int(i) for i in np.argsort(order)])
    if len(axes) == 1:
        return fake_quant(x, *ends, **more)
    flat = tf.reshape(x, [*sizes[: axes[0]], int(np.prod(sizes[axes[0] :]))])
    return tf.reshape(fake_quant(flat, *ends, **more), sizes)
