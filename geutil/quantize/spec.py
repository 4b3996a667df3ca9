"""Specifications of quantization: schemes, op by op; arithmetic of ranges and levels.

A value x of a range [low, high] is stored as an integer q of b bits, with
x = scale * (q - zero point). Zero has to be one of the values, since padding and Relu
make exact zeros (Jacob et al. 2018, arXiv 1712.05877, section 3).

Where the rows of a matrix [inputs, outputs] differ in size, one range for a whole
column wastes the levels of 4 bits on the largest of them. In blocks of B inputs each
column has inputs / B ranges (Dettmers and Zettlemoyer 2023, arXiv 2212.09720).
FakeQuant ops know channels along the last axis alone, so the matrix is brought to
[B, inputs / B * outputs] before them, and back behind them. LiteRT has one kernel for
that: FULLY_CONNECTED, on floats and weights of 4 bits. It takes steps in float16 alone
(LiteRT 2.1 to 2.3), so that only such are simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, QuantizeError, SelectionError, Words
from geutil.graph import creation, op_types
from geutil.graph.resource_variables import check_step_variable
from geutil.graph.types import Operation, is_in_scope, is_op, type_name
from geutil.quantize.planning.int8_kernels import ACTIVATIONS, PRODUCTS
from geutil.quantize.planning.layer_rows import reads_in_order, rows_of
from geutil.select import selections
from geutil.select.networks.layers import Layer, is_by_groups
from geutil.select.selections import can_be_regex, make_regex

Array = np.ndarray[Any, Any]

_CONSTANT_BITS = 8  # fewer would not make a file smaller: parameters are few
FEWEST_BITS, MOST_BITS = 2, 16
"""The bits that FakeQuant ops take."""
BLOCK_BITS = 4
"""The most bits of weights in blocks."""


class Range(NamedTuple):
    """The smallest and the largest value that can be stored."""

    low: Any
    high: Any


def check_bits(bits: Any, what: str = "bits") -> None:
    """Raise QuantizeError unless FakeQuant ops take a number of bits."""
    if isinstance(bits, bool) or not isinstance(bits, int | np.integer):
        raise QuantizeError(f"{what} is a whole number, not {bits!r}")
    if not FEWEST_BITS <= bits <= MOST_BITS:
        raise QuantizeError(
            f"{what}={bits} is out of range: FakeQuant ops take {FEWEST_BITS} to "
            f"{MOST_BITS} bits"
        )


def levels(bits: int, narrow_range: bool = False) -> int:
    """Return how many values there are: 2^bits, one less for a narrow range.

    Example:
        >>> from geutil.quantize.spec import levels
        >>> levels(8), levels(8, narrow_range=True)
        (256, 255)
    """
    return int(2**bits) - int(narrow_range)


def with_zero(low: Any, high: Any) -> Range:
    """Return a range that is widened until it holds zero."""
    return Range(np.minimum(low, 0.0), np.maximum(high, 0.0))


def symmetric(low: Any, high: Any, bits: int, narrow_range: bool) -> Range:
    """Return the smallest range around a range whose zero point is in the middle.

    Example:
        >>> from geutil.quantize.spec import symmetric
        >>> [float(end) for end in symmetric(-0.5, 1.0, 8, narrow_range=True)]
        [-1.0, 1.0]
        >>> [float(end) for end in symmetric(-1.0, 0.5, 8, narrow_range=False)]
        [-1.0, 0.9921875]
    """
    # A narrow range has low = -high. A wide one has one value more below zero than
    # above: high = -low * (2^(bits-1) - 1) / 2^(bits-1).
    ratio = symmetric_ratio(bits, narrow_range)
    low, high = with_zero(low, high)
    return Range(np.minimum(low, -high / ratio) + 0.0, np.maximum(high, -low * ratio))


def symmetric_ratio(bits: int, narrow_range: bool) -> float:
    """Return -high / low of a symmetric range."""
    return 1.0 if narrow_range else (2 ** (bits - 1) - 1) / 2 ** (bits - 1)


def nudged(low: Any, high: Any, bits: int, narrow_range: bool = False) -> Range:
    """Return a range moved by less than a step, so that zero is one of its values.

    Example:
        >>> import numpy as np
        >>> from geutil.quantize.spec import nudged
        >>> low, high = nudged(-0.1, 6.3, bits=8)
        >>> print(f"{low:.5f} {high:.5f}")
        -0.10039 6.29961
    """
    # FakeQuant ops do this themselves, in float32.
    low, high = (np.asarray(v, np.float32) for v in with_zero(low, high))
    least = np.float32(narrow_range)
    most = np.float32(2**bits - 1)
    scale = step(low, high, bits, narrow_range)
    with np.errstate(divide="ignore", invalid="ignore"):
        zero_point = np.where(scale > 0, least - low / scale, least)
    zero_point = np.clip(np.floor(zero_point + np.float32(0.5)), least, most)
    return Range((least - zero_point) * scale, (most - zero_point) * scale)


def step(low: Any, high: Any, bits: int, narrow_range: bool = False) -> Array:
    """Return the distance of two neighbouring values, in float32."""
    low, high = (np.asarray(v, np.float32) for v in with_zero(low, high))
    return np.asarray((high - low) / np.float32(levels(bits, narrow_range) - 1))


@dataclass(frozen=True)
class Spec:
    """How to quantize an op that differs from the rest; None is like the rest.

    Attributes:
        weight_bits: the bits of its weights, 2 to 16.
        activation_bits: the bits of its result.
        symmetric_weights: whether the range of its weights is symmetric about zero.
        per_channel: whether each output channel of its weights has its own range.
        range: the fixed range of its result, as (low, high); it is not learnt then.
        ema_decay: the decay of the moving average of the range in each training step.

    Example:
        >>> from geutil.quantize import Spec
        >>> Spec(weight_bits=4).weight_bits
        4
    """

    weight_bits: int | None = None
    activation_bits: int | None = None
    symmetric_weights: bool | None = None
    per_channel: bool | None = None
    range: Sequence[float] | None = None
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        """Refuse values that FakeQuant ops do not take."""
        for name in ("weight_bits", "activation_bits"):
            if getattr(self, name) is not None:
                check_bits(getattr(self, name), name)
        if self.range is not None and not _is_range(self.range):
            raise QuantizeError(
                f"range={self.range!r} is no range; pass (low, high) with "
                "low <= 0 <= high and low < high"
            )
        if self.ema_decay is not None:
            check_decay(self.ema_decay)


def check_decay(decay: float) -> None:
    """Raise QuantizeError unless a moving average can be made with a decay."""
    if not 0.0 <= decay < 1.0:
        raise QuantizeError(f"ema_decay={decay} is out of range: pass 0 <= decay < 1")


def checked_ends(
    low: float, high: float, *, stays: bool = False
) -> tuple[float, float]:
    """Return the range to start with."""
    # `stays`: it is not learnt. Else it may be empty: before anything was learnt, all
    # values are quantized to zero.
    if not low <= 0.0 <= high or (stays and low == high):
        more = ", and not both 0" if stays else ""
        raise QuantizeError(
            f"init_min={low} and init_max={high} are no range: pass "
            f"init_min <= 0 <= init_max{more}"
        )
    return float(low), float(high)


def _is_range(ends: Sequence[float]) -> bool:
    return len(ends) == 2 and ends[0] <= 0.0 <= ends[1] and ends[0] < ends[1]


@dataclass(frozen=True)
class Format:
    """How one tensor is stored."""

    bits: int = 8
    symmetric: bool = False  # whether the range is symmetric about zero
    narrow_range: bool = False  # whether the lowest integer is left out
    # The axes that together count the channels that have a range each; none if the
    # whole tensor has one.
    axes: tuple[int, ...] = ()
    # How many inputs of a channel have a range together; None is all.
    block: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.bits} bits"]
        if self.symmetric:
            parts.append("symmetric")
        if self.block is not None:
            parts.append(f"by blocks of {self.block}")
        elif self.axes:
            parts.append("per channel")
        return ", ".join(parts)


SYMMETRIC_START = 6.1
"""The reach of symmetric ranges of activations to start with: not 6, which is what
those behind a Relu6 may learn."""


def activation_format(bits: int) -> Format:
    """Return how activations are stored: in 16 bits without a zero point."""
    is_symmetric = bits == MOST_BITS
    return Format(bits, is_symmetric, is_symmetric)


def fixed_range(ends: tuple[float, float], bits: int) -> tuple[float, float]:
    """Return a range that kernels have built in, for a number of bits."""
    if bits != MOST_BITS:
        return ends
    largest = 2.0 ** np.ceil(np.log2(max(-ends[0], ends[1])))
    reach = float(largest * (1 - 2.0 ** (1 - bits)))
    return -reach, reach


SKIP = "skip"
Override = Spec | str


@dataclass(frozen=True, eq=False)
class QuantizeChoices:
    """How ops are quantized; see `geutil.quantize.quantize`."""

    weight_bits: int = 8
    activation_bits: int = 8
    symmetric_weights: bool = True
    per_channel: bool = True
    ema_decay: float = 0.999
    scope: tuple[str, ...] | None = None
    overrides: Mapping[Any, Override] = field(default_factory=dict)
    activations: frozenset[str] = ACTIVATIONS
    initial: tuple[float, float] = (-6.0, 6.0)
    depthwise_bits: int | None = None
    """Bits of the weights of depthwise and grouped convolutions; None: as others."""
    weights_only: bool = False
    """Quantize the weights of layers, and no activations."""
    fewest_weights: int = 0
    """Leave layers with fewer weights in float, unless an override is for them."""
    block: int | None = None
    """How many inputs of a product have a range together, with `BLOCK_BITS` bits."""
    products_at_end: bool = False
    """Quantize products behind the last layer that lead to no loss, too."""
    stands_for: Mapping[Operation, Operation] = field(default_factory=dict)
    """Ops that were made to stand in for others, whose overrides are for them."""

    def __post_init__(self) -> None:
        """Refuse impossible choices."""
        check_bits(self.weight_bits, "weight_bits")
        check_bits(self.activation_bits, "activation_bits")
        check_decay(self.ema_decay)
        for name in sorted(self.activations - ACTIVATIONS):
            raise QuantizeError(
                f"'{name}' is no activation that is known; these are "
                f"{', '.join(sorted(ACTIVATIONS))}"
            )
        for key, value in self.overrides.items():
            if not (is_op(key) or can_be_regex(key) or selections.is_name(key)):
                raise ArgumentTypeError(
                    "overrides are for ops, Keras layers, or regular expressions of "
                    f"the names of ops, not for {type_name(key)}"
                )
            if value != SKIP and not isinstance(value, Spec):
                raise ArgumentTypeError(
                    f"an override is a geutil.quantize.Spec or '{SKIP}', not {value!r}"
                )

    def bits_of_weights(self, ops: Iterable[Operation]) -> int:
        """Return the bits of the weights that a group of ops reads."""
        if self.depthwise_bits is None:
            return self.weight_bits
        return self.depthwise_bits if any(map(is_by_groups, ops)) else self.weight_bits

    def in_scope(self, op: Operation) -> bool:
        """Return whether an op is in the scope that is asked for."""
        return is_in_scope(op.name, self.scope)

    def matcher(self, ops: Iterable[Operation]) -> Overrides:
        """Return the overrides, matched to ops."""
        return Overrides(self, list(ops))


@dataclass(frozen=True, eq=False)
class Mode:
    """How ranges come about."""

    is_training: bool  # learn them; else they are read
    # The training step from which on anything is quantized; 0 is at once.
    delay: int = 0
    # The variable that counts the steps; None makes one where it is needed.
    step: Any = None


def checked_delay(delay: Any, is_training: bool, step: Any = None) -> int:
    """Return the delay as a number."""
    if step is not None:
        check_step_variable(step)
    if delay is None:
        return 0
    if isinstance(delay, bool) or not isinstance(delay, int):
        raise ArgumentTypeError(
            f"quant_delay is a number of steps or None, not {type_name(delay)}"
        )
    if delay < 0:
        raise QuantizeError(f"quant_delay is {delay}; pass 0 or more")
    if delay and not is_training:
        raise QuantizeError("quant_delay is for training; pass is_training=True")
    return delay


class Overrides:
    """The overrides of the ops of a graph."""

    def __init__(self, choices: QuantizeChoices, ops: list[Operation]) -> None:
        self._choices = choices
        self._found: dict[Operation, Override] = {}
        # Those that are no "skip": the name of each, what it asks for, and the ops that
        # it counts for; none where others came first.
        self.specs: list[tuple[str, Spec, list[Operation]]] = []
        # An op, and what overrides may call it.
        called = [(op, (op, choices.stands_for.get(op, op))) for op in ops]
        for key, value in choices.overrides.items():
            name = getattr(key, "name", getattr(key, "pattern", key))
            meant = _ops_of_layer(key, ops)
            matched = [op for op, others in called if _is_meant(key, others, meant)]
            if not matched:
                raise QuantizeError(
                    f"the override '{name}' is for no op that computes with data; "
                    "overrides take ops of the graph, Keras layers, or regular "
                    "expressions that are searched for in the names of ops"
                    f"{_hint(name, ops)}"
                )
            new = [op for op in matched if op not in self._found]
            self._found.update(dict.fromkeys(new, value))
            if isinstance(value, Spec):
                self.specs.append((name, value, new))

    def asked(self, op: Operation) -> bool:
        """Return whether an op is to be quantized in a way of its own."""
        return isinstance(self._found.get(op), Spec)

    def skipped(self, op: Operation) -> bool:
        """Return whether an op is not to be quantized."""
        return self._found.get(op) == SKIP

    def constant_spec(self, op: Operation) -> Spec:
        """Return how the parameters of an op are quantized that is no layer."""
        # They are few, and stored like the data that the op reads besides; unless an
        # override asks for fewer bits.
        spec, asked = self.spec([op]), self._special([op]).weight_bits
        like_data = max(spec.activation_bits or 0, _CONSTANT_BITS)
        bits = _first(asked, max(self._choices.weight_bits, like_data))
        return replace(spec, weight_bits=bits)

    def block_spec(self, op: Operation) -> Spec:
        """Return how an op is quantized if its weights are in blocks."""
        bits = _first(self._special([op]).weight_bits, BLOCK_BITS)
        return replace(self.spec([op]), weight_bits=bits)

    def spec(self, ops: Iterable[Operation]) -> Spec:
        """Return how a group of ops is quantized, with all choices filled in."""
        ops = list(ops)
        special = self._special(ops)
        base = self._choices
        return Spec(
            _first(special.weight_bits, base.bits_of_weights(ops)),
            _first(special.activation_bits, base.activation_bits),
            _first(special.symmetric_weights, base.symmetric_weights),
            _first(special.per_channel, base.per_channel),
            special.range,
            _first(special.ema_decay, base.ema_decay),
        )

    def _special(self, ops: list[Operation]) -> Spec:
        """Return the overrides of a group of ops as one Spec."""
        choice_by_field: dict[str, tuple[Operation, Any]] = {}
        for op in ops:
            spec = self._found.get(op)
            for name, value in chosen(spec) if isinstance(spec, Spec) else ():
                other, before = choice_by_field.setdefault(name, (op, value))
                if before != value:
                    raise QuantizeError(
                        f"'{other.name}' and '{op.name}' are computed by one kernel, "
                        f"and overrides ask for {name}={before} and {name}={value}; "
                        "ask for one of them"
                    )
        return Spec(**{name: value for name, (_, value) in choice_by_field.items()})


def chosen(spec: Spec) -> list[tuple[str, Any]]:
    """Return the set fields of a Spec: names and values."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    if spec.range is not None:
        values["range"] = tuple(float(end) for end in spec.range)
    return [(name, value) for name, value in values.items() if value is not None]


def _first(special: Any, otherwise: Any) -> Any:
    return otherwise if special is None else special


def _ops_of_layer(key: Any, ops: list[Operation]) -> frozenset[Operation] | None:
    """Return the ops of the layer that an override is for; None if it is for none."""
    if not ops or not selections.is_name(key):
        return None
    try:
        found = selections.ops_of_layers(ops[0].graph, key)
    except SelectionError as error:
        raise QuantizeError(f"an override is for no layer: {error}") from error
    # A string that names no layer is a regular expression.
    return frozenset(found) if found or not isinstance(key, str) else None


def _is_meant(
    key: Any, ops: Iterable[Operation], meant: frozenset[Operation] | None
) -> bool:
    if meant is not None:
        return any(op in meant for op in ops)
    if is_op(key):
        return key in ops
    regex = make_regex(key)
    return any(regex.search(op.name) for op in ops)


def _hint(name: Any, ops: list[Operation]) -> str:
    if not ops or not isinstance(name, str):
        return ""
    return f"; {selections.similar(ops[0].graph, name)}"


_MATRIX_PRODUCTS = frozenset(("BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul"))
_KERNEL_BITS = 8  # those of the kernels that read a range for each channel of a matrix


def format_of(layer: Layer, spec: Spec) -> Format:
    """Return how the weights of a layer are stored."""
    axes = layer.outputs if spec.per_channel and _by_channel(layer, spec) else ()
    if layer.sizes(axes) is None:
        axes = ()
    return _weights_format(spec, axes)


def constant_format(spec: Spec) -> Format:
    """Return how a parameter is stored that is no weight of a layer."""
    return _weights_format(spec, ())


def _weights_format(spec: Spec, axes: tuple[int, ...]) -> Format:
    symmetric = bool(spec.symmetric_weights)
    return Format(spec.weight_bits or _KERNEL_BITS, symmetric, symmetric, axes)


def _by_channel(layer: Layer, spec: Spec) -> bool:
    """Return whether the weights of a layer can have a range for each channel."""
    if layer.op.type in op_types.CONVOLUTIONS_2D:
        return True
    # FULLY_CONNECTED reads matrices with a range for each output, if it is symmetric.
    if layer.op.type not in _MATRIX_PRODUCTS or layer.kernel.shape.rank != 2:
        return False
    bits = spec.weight_bits or _KERNEL_BITS
    return (
        layer.outputs == (1,) and bits <= _KERNEL_BITS and bool(spec.symmetric_weights)
    )


BLOCK_MARK = "_geutil_blocks"
"""The mark of FakeQuant ops whose columns are blocks."""
BLOCK_MOVES = ("Reshape", "Transpose", "Reshape")
"""The ops that bring weights to FakeQuant ops of blocks, and those behind these."""
_LARGEST_STEP = float(np.finfo(np.float16).max)


def block_format(layer: Layer, spec: Spec, block: int) -> Format | str:
    """Return how the weights of a layer are stored in blocks, or why they are not."""
    if layer.op.type not in PRODUCTS:
        return ""
    if (spec.weight_bits or BLOCK_BITS) > BLOCK_BITS:
        return f"TFLite has no kernel for blocks of {spec.weight_bits} bits"
    if not (spec.per_channel and spec.symmetric_weights):
        return "blocks are symmetric, and parts of channels"
    if layer.weights == 0:
        return "it reads its weights before the data"
    rows = rows_of(layer)
    if isinstance(rows, str):
        return f"it {rows}"
    groups, inputs, _ = rows.sizes
    if groups > 1 or rows.counts[0]:
        return "it multiplies several matrices"
    if inputs % block:
        return f"its {inputs} inputs are no multiple of {block}"
    axes = rows.order[rows.counts[1] :]
    together = list(range(axes[0], axes[0] + len(axes)))
    at_an_end = axes[0] == 0 or axes[-1] == len(rows.shape) - 1
    if list(axes) != together or not at_an_end or not reads_in_order(layer):
        return "it reads inputs that do not lie in a row in its weights"
    return Format(spec.weight_bits or BLOCK_BITS, True, True, axes, block)


def in_blocks(x: Any, form: Format, of: Any = tf) -> Any:
    """Return weights with their blocks as columns: [block, blocks * outputs]."""
    split, order = _block_split(form, _shape(x))
    return of.reshape(of.transpose(of.reshape(x, split), order), [form.block, -1])


def from_blocks(x: Any, form: Format, shape: list[int]) -> Any:
    """Return weights in their own shape again; see `in_blocks`."""
    split, order = _block_split(form, shape)
    # Both orders are their own inverses.
    return tf.reshape(
        tf.transpose(tf.reshape(x, [split[axis] for axis in order]), order), shape
    )


def block_count(form: Format, shape: list[int]) -> int:
    """Return how many blocks weights have in all."""
    return int(np.prod(shape)) // (form.block or 1)


def with_stored_steps(ends: Range, form: Format) -> Range:
    """Return symmetric ranges with the nearest steps that a file can store.

    Example:
        >>> import numpy as np
        >>> from geutil.quantize.spec import Format, Range, with_stored_steps
        >>> form = Format(4, True, True, (1,), block=32)
        >>> ends = Range(np.float32([-0.7]), np.float32([0.7]))
        >>> low, high = with_stored_steps(ends, form)
        >>> float(high[0] / 7) == float(np.float16(0.1))
        True
    """
    # Those of blocks are float16, of 11 bits: the largest weight may lie 0.003 steps
    # outside; what lies beyond levels of 65504, the largest of them, is cut off. Other
    # ranges are returned as they are.
    if form.block is None:
        return ends
    most = np.float32(2 ** (form.bits - 1) - 1)
    if tf.is_tensor(ends.high):
        step = tf.minimum(ends.high / most, _LARGEST_STEP)
        size = tf.cast(tf.cast(step, tf.float16), tf.float32) * most
    else:
        step = np.minimum(np.asarray(ends.high, np.float32) / most, _LARGEST_STEP)
        size = step.astype(np.float16).astype(np.float32) * most
    return Range(-size, size)


def block_of(simulation: Operation) -> int | None:
    """Return how many inputs a range of a FakeQuant op is for; None without blocks."""
    is_marked = creation.has_mark(simulation, BLOCK_MARK)
    return int(simulation.inputs[0].shape[0]) if is_marked else None


def _block_split(form: Format, shape: list[int]) -> tuple[list[int], list[int]]:
    """Return the shape of weights with blocks apart, and the order that joins them."""
    block = form.block or 1
    outputs = int(np.prod([shape[axis] for axis in form.axes]))
    blocks = block_count(form, shape) // outputs
    if form.axes[0] == 0:
        return [outputs, blocks, block], [2, 1, 0]
    return [blocks, block, outputs], [1, 0, 2]


def _shape(x: Any) -> list[int]:
    return list(x.shape)


FOLD = Words("geutil.batchnorm.fold_batch_norms")
QUANTIZE = Words("geutil.quantize.quantize(model, is_training=False)")

FEWEST_ROUNDED = 1024
"""Layers with fewer weights take longer to round their data than that saves; TFLite's
converter leaves as many in float."""


@dataclass(frozen=True)
class Scheme:
    """How a network is stored and computed, by the field's names.

    A scheme is named after its activations and its weights: "int16x8" has activations
    of 16 bits and weights of 8. The kernels that TFLite has are measured in
    `tests/quantize/test_int16_kernels.py` and `tests/quantize/test_kernels.py`.

    | scheme | weights | activations | computes in |
    |---|---|---|---|
    | int8 | 8 | 8 | integers |
    | int8x4 | 4, depthwise ones 8 | 8 | integers |
    | int16x8 | 8 | 16, symmetric | integers |
    | dynamic_range | 8 | float | integers, rounded as the file runs |
    | dynamic_range_int4 | of products 4 by blocks, else 8 | float | likewise |
    | weight_only_int8 | 8 | float | floats |
    | weight_only_int4 | 4, depthwise ones 8 | float | floats |
    | float16 | float16 | float | floats |

    Depthwise convolutions have few weights, one filter for each channel, which few bits
    hurt most; TFLite's fast kernels (XNNPACK) have no 4-bit ones for them either.

    Weights by blocks have a range for each 32 inputs of a channel. LiteRT computes with
    them in one kernel only, FULLY_CONNECTED on data that it rounds as the file runs:
    where it is to unpack them it makes zeros, so that no scheme in floats has blocks.
    """

    name: str
    weight_bits: int = 8  # bits of the weights of layers that are not in blocks
    activation_bits: int | None = 8  # bits of activations; None leaves them in float
    depthwise_bits: int = 8  # bits of the weights of depthwise convolutions
    # True if TFLite rounds activations while it runs, in ranges that it finds then.
    at_run_time: bool = False
    is_float: bool = False  # whether nothing is stored in integers
    # How many inputs of a product have a range together, in each channel; None is all.
    # Weights in blocks have `BLOCK_BITS`.
    block: int | None = None

    @property
    def fewest_weights(self) -> int:
        """How many weights a layer needs to be stored in integers."""
        return FEWEST_ROUNDED if self.at_run_time else 0

    @property
    def weights_only(self) -> bool:
        """True if activations stay in float until the file runs."""
        return self.activation_bits is None


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8"),
        Scheme("int8x4", weight_bits=4),
        Scheme("int16x8", activation_bits=16),
        Scheme("dynamic_range", activation_bits=None, at_run_time=True),
        Scheme("dynamic_range_int4", 8, None, at_run_time=True, block=32),
        Scheme("weight_only_int8", activation_bits=None),
        Scheme("weight_only_int4", weight_bits=4, activation_bits=None),
        Scheme("float16", activation_bits=None, is_float=True),
    )
}


def scheme_named(name: str) -> Scheme:
    """Return a scheme.

    Example:
        >>> from geutil.quantize.spec import scheme_named
        >>> scheme_named("int16x8").activation_bits
        16
    """
    if name not in SCHEMES:
        raise QuantizeError(
            f"there is no scheme '{name}'; the schemes are {', '.join(SCHEMES)}"
        )
    return SCHEMES[name]
