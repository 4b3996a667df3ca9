"""A model of the zoo: what is called, on which inputs, and who owns its variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

Array = np.ndarray[Any, Any]
Draw = Callable[[np.random.Generator, Sequence[int]], Array]
Sample = dict[str, Array]

ROWS = 5
"""How many rows a model is compared on."""
FEWER = 3
"""The other batch size: the first ones of these rows."""
MANY = 32
"""How many rows gradients are taken of: with few there is little to be saved."""
_LENGTH = 12
BATCHES = 4
"""How many batches of `ROWS` rows there are to calibrate with."""


class Subject(Protocol):
    """What a builder returns."""

    inputs: Mapping[str, tf.TensorSpec]
    draws: Mapping[str, Draw]
    norms: int | None

    def write(self, path: Path) -> None:
        """Write a SavedModel with the signature `serving_default`."""


@dataclass
class Function:
    """A model that is called in TensorFlow 2.

    Attributes:
        call: computes the outputs by name, for inference.
        inputs: the inputs by name; the first axis is None where it is the batch.
        holder: owns the variables and tables.
        draws: how inputs are drawn that are not to be normal floats, or 0 and 1.
        train: as `call`, for training; None where that is the same.
        network: the Keras model; None for other functions.
        counted_norms: how many batch norms there are, where no Keras model tells it;
            None if nobody knows.
        signatures: other signatures by name.
    """

    call: Callable[..., dict[str, Any]]
    inputs: Mapping[str, tf.TensorSpec]
    holder: tf.Module
    draws: Mapping[str, Draw] = field(default_factory=dict)
    train: Callable[..., dict[str, Any]] | None = None
    network: Any = None
    counted_norms: int | None = None
    signatures: Mapping[str, Any] = field(default_factory=dict)

    def concrete(self, training: bool = False) -> Any:
        """Return the function, traced."""
        call = self.train if training and self.train is not None else self.call
        return tf.function(call, autograph=False).get_concrete_function(**self.inputs)

    @property
    def norms(self) -> int | None:
        """How many batch norms its outputs depend on; None if nobody knows."""
        if self.network is None:
            return self.counted_norms
        return len(norms_in(self.network, self.concrete()))

    def write(self, path: Path) -> None:
        """Write a SavedModel with the signature `serving_default`."""
        signatures = {"serving_default": self.concrete(), **self.signatures}
        tf.saved_model.save(self.holder, str(path), signatures=signatures)

    @property
    def trainable(self) -> list[tf.Variable]:
        """The variables that are trained, in order."""
        if self.network is not None:
            return [variable_of(v) for v in self.network.trainable_variables]
        return list(self.holder.trainable_variables)


@dataclass
class GraphOfVersion1:
    """A graph of version 1 with its Session.

    Attributes:
        session: holds the values of the variables.
        inputs: the inputs by name; the placeholders have these names.
        outputs: the outputs by name.
        draws: as those of a `Function`.
        norms: likewise.
        frozen: whether the old tool can freeze it.
        control_flow_v2: whether its control flow is functional.
    """

    session: Any
    inputs: Mapping[str, tf.TensorSpec]
    outputs: Mapping[str, tf.Tensor]
    draws: Mapping[str, Draw] = field(default_factory=dict)
    norms: int | None = None
    frozen: bool = True
    control_flow_v2: bool = False

    def write(self, path: Path) -> None:
        """Write a SavedModel with the signature `serving_default`."""
        v1 = tf.compat.v1
        graph = self.session.graph
        with graph.as_default():
            inputs = {n: graph.get_tensor_by_name(f"{n}:0") for n in self.inputs}
            signature = v1.saved_model.predict_signature_def(inputs, dict(self.outputs))
            tables = graph.get_collection(v1.GraphKeys.TABLE_INITIALIZERS)
            builder = v1.saved_model.Builder(str(path))
            builder.add_meta_graph_and_variables(
                self.session,
                ["serve"],
                {"serving_default": signature},
                main_op=tf.group(*tables) if tables else None,
            )
            builder.save()

    def freeze(self) -> tf.compat.v1.GraphDef:
        """Return the graph with constants for variables, by the old tool."""
        v1 = tf.compat.v1
        graph = self.session.graph
        names = [t.op.name for t in self.outputs.values()]
        return v1.graph_util.convert_variables_to_constants(
            self.session, graph.as_graph_def(), names
        )


@contextmanager
def flow_of(control_flow_v2: bool) -> Iterator[None]:
    """Build control flow of one of the two versions."""
    v1 = tf.compat.v1
    before = v1.control_flow_v2_enabled()
    (v1.enable_control_flow_v2 if control_flow_v2 else v1.disable_control_flow_v2)()
    try:
        yield
    finally:
        (v1.enable_control_flow_v2 if before else v1.disable_control_flow_v2)()


def ints(low: int, high: int) -> Draw:
    """Draw integers from `low` up to, but without, `high`."""
    return lambda rng, shape: rng.integers(low, high, shape)


def ones(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    """Draw nothing but ones."""
    return np.ones(shape)


def positions(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    """Count along the second axis."""
    return np.broadcast_to(np.arange(shape[1]), shape)


def uniform(low: float, high: float) -> Draw:
    """Draw floats between two numbers."""
    return lambda rng, shape: rng.uniform(low, high, shape)


def words(*known: str) -> Draw:
    """Draw strings, out of these."""
    return lambda rng, shape: rng.choice(np.array([w.encode() for w in known]), shape)


def draw(subject: Subject, seed: int, rows: int = ROWS) -> Sample:
    """Return values for the inputs, the same ones each time."""
    return draw_all(subject.inputs, seed, subject.draws, rows)


def draw_all(
    inputs: Mapping[str, tf.TensorSpec],
    seed: int,
    draws: Mapping[str, Draw] | None = None,
    rows: int = ROWS,
) -> Sample:
    """Return values for inputs by name, the same ones each time."""
    rng = np.random.default_rng(seed)
    return {
        name: _drawn(rng, spec, (draws or {}).get(name), rows)
        for name, spec in inputs.items()
    }


def _drawn(
    rng: np.random.Generator, spec: tf.TensorSpec, how: Draw | None, rows: int
) -> Array:
    shape = [rows if size is None else size for size in spec.shape.as_list()]
    if how is None:
        is_float = spec.dtype.is_floating or spec.dtype.is_complex
        how = _normal if is_float else ints(0, 2)
    values = np.asarray(how(rng, shape))
    return values if spec.dtype == tf.string else values.astype(_numpy_dtype(spec))


def _numpy_dtype(spec: tf.TensorSpec) -> Any:
    return spec.dtype.as_numpy_dtype


def _normal(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    return rng.standard_normal(shape)


def has_batch(subject: Subject) -> bool:
    """Tell whether all inputs have a batch axis of any size."""
    shapes = [spec.shape for spec in subject.inputs.values()]
    return all(s.rank and s[0] is None for s in shapes) and bool(shapes)


def first_rows(sample: Sample, subject: Subject, rows: int) -> Sample:
    """Return a sample's first rows."""
    batched = {n for n, s in subject.inputs.items() if s.shape.rank and not s.shape[0]}
    return {n: x[:rows] if n in batched else x for n, x in sample.items()}


def variable_of(variable: Any) -> tf.Variable:
    """Return what TensorFlow holds behind a variable of Keras 3."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def of_keras(
    network: Any,
    draws: Mapping[str, Draw] | None = None,
    lengths: Mapping[str, int] | None = None,
    perturbed: bool = True,
) -> Function:
    """Return a Keras model, of Keras 3 or of tf_keras, as a subject.

    Args:
        network: a functional model.
        draws: how its inputs are drawn.
        lengths: the size of unknown axes behind the first, by input; else 12.
        perturbed: whether norms and biases get random values.
    """
    if perturbed:
        perturb(network)
    structure = network.input
    inputs = {}
    for tensor in tf.nest.flatten(structure):
        first, *rest = tensor.shape
        name = _name(tensor)
        length = (lengths or {}).get(name, _LENGTH)
        shape = [first, *(length if size is None else size for size in rest)]
        inputs[name] = tf.TensorSpec(shape, tensor.dtype, name=name)

    def call(training: bool, values: Mapping[str, Any]) -> dict[str, Any]:
        packed = tf.nest.map_structure(lambda t: values[_name(t)], structure)
        return named(network(packed, training=training))

    holder = tf.Module()
    holder.kept = [variable_of(v) for v in network.variables]
    return Function(
        lambda **values: call(False, values),
        inputs,
        holder,
        draws or {},
        lambda **values: call(True, values),
        network,
    )


def _name(tensor: Any) -> str:
    return str(tensor.name).split(":")[0]


def named(outputs: Any) -> dict[str, Any]:
    """Return outputs in any structure by name."""
    if isinstance(outputs, Mapping) and all(map(tf.is_tensor, outputs.values())):
        return {str(name): value for name, value in outputs.items()}
    flat = tf.nest.flatten(outputs)
    return {f"output_{i}": value for i, value in enumerate(flat)}


def perturb(network: Any) -> None:
    """Give norms and biases random values: as they come, they do nothing."""
    rng = np.random.default_rng(1)
    draws = {
        "moving_mean": lambda shape: 0.3 * rng.standard_normal(shape),
        "moving_variance": lambda shape: rng.uniform(0.5, 1.5, shape),
        "gamma": lambda shape: rng.uniform(0.7, 1.3, shape),
        "beta": lambda shape: 0.1 * rng.standard_normal(shape),
        "bias": lambda shape: 0.05 * rng.standard_normal(shape),
        # By one, as they come, the converter does not multiply.
        "scale": lambda shape: rng.uniform(0.7, 1.3, shape),
    }
    for variable in network.variables:
        last = variable.name.split(":")[0].rsplit("/", 1)[-1]
        # The scale of a norm has other names, too.
        is_ones = len(variable.shape) == 1 and bool(np.all(np.asarray(variable) == 1))
        if last in draws or is_ones:
            variable.assign(draws.get(last, draws["gamma"])(variable.shape))
    _tell_apart(network, rng)
    for layer in layers_of(network):
        _keep_signals(layer)


def _tell_apart(network: Any, rng: np.random.Generator) -> None:
    """Change matrices that are equal to others, as layers of one initializer have them.

    TFLite's post-training quantization makes one of equal layers, which trained ones
    never are.
    """
    known = set()
    for variable in network.trainable_variables:
        values = np.asarray(variable)
        if values.ndim < 2 or values.dtype.kind != "f":
            continue
        if values.tobytes() in known:
            values = values + 0.3 * values.std() * rng.standard_normal(values.shape)
            variable.assign(values)
        known.add(np.asarray(variable).tobytes())


def _keep_signals(layer: Any) -> None:
    """Scale a convolution's kernels so that rows still differ behind many of them.

    As Keras draws them, values shrink with each layer and its Relu, and nothing but the
    biases is left (He et al. 2015, equation 10, is for norms that do not rescale).
    """
    kind = type(layer).__name__
    for name in ("kernel", "depthwise_kernel", "pointwise_kernel"):
        kernel = getattr(layer, name, None)
        if "Conv" not in kind or kernel is None or len(kernel.shape) < 3:
            continue
        values = np.asarray(kernel)
        by_channel = "Depthwise" in kind or name == "depthwise_kernel"
        read = values.shape[: -2 if by_channel else -1]
        kernel.assign(values * np.sqrt(2.0 / np.prod(read)) / max(values.std(), 1e-6))


def norms_in(network: Any, concrete: Any) -> list[Any]:
    """Return the batch norms of a Keras model that a function of it reads.

    A network may own layers that its outputs do not depend on.
    """
    known = {id(captured) for captured, _ in concrete.graph.captures}
    return [
        layer
        for layer in layers_of(network)
        if type(layer).__name__ in ("BatchNormalization", "SyncBatchNormalization")
        and any(id(variable_of(v).handle) in known for v in layer.variables)
    ]


def layers_of(network: Any) -> list[Any]:
    """Return all layers of a Keras model, each once."""
    if hasattr(network, "submodules"):
        return [m for m in network.submodules if hasattr(m, "weights")]
    return list(network._flatten_layers(include_self=False))
