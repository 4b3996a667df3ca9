"""Comparison of the outputs of two models: the largest differences and their positions.

Element by element within tolerances; `geutil.batchnorm.fold_report` compares relative
to the range of an output, and refuses what this reports, such as NaN or another dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ModelError, Words
from geutil.graph import op_types, resource_variables
from geutil.graph.types import Operation, Tensor, type_name
from geutil.lazy import Shown
from geutil.model.core import EditableModel
from geutil.select.networks.data import batches
from geutil.select.networks.outputs import Difference, Motion, Tally, rows_of


@dataclass(frozen=True)
class Comparison(Shown):
    """The differences of two models' outputs for the same inputs.

    Its truth value is `equal`, so that `assert model.compare(other)` reads well.

    Attributes:
        differences: the largest difference of each output of the first model.
        samples: the number of batches of inputs; `motions` has the number of samples in
            each.
        rtol: the relative tolerance.
        atol: the absolute tolerance.
        motions: how much each output of the other model varies over the samples; if
            within the tolerances, the comparison proves nothing.
    """

    differences: Mapping[str, Difference]
    samples: int
    rtol: float
    atol: float
    motions: Mapping[str, Motion] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Return whether all outputs agree within the tolerances, for all inputs."""
        return all(d.equal for d in self.differences.values())

    @property
    def largest(self) -> float:
        """The largest absolute difference of all outputs."""
        return max((d.absolute for d in self.differences.values()), default=0.0)

    @property
    def relative(self) -> float:
        """The largest difference relative to the largest magnitude of its output."""
        shares = (
            motion.relative(self.differences[name].absolute)
            for name, motion in self.motions.items()
        )
        return max(shares, default=0.0)

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "different"
        counts = [motion.samples for motion in self.motions.values()]
        samples = f"{max(counts)} sample(s) in " if counts else ""
        head = (
            f"{verdict} on {samples}{self.samples} batch(es) (rtol {self.rtol:g}, "
            f"atol {self.atol:g})"
        )
        return "\n".join([head, *map(self._line, self.differences)])

    def _line(self, name: str) -> str:
        """Return how far an output is apart, and how much it moves."""
        found, moves = self.differences[name], ""
        if name in self.motions:
            moves = self.motions[name].told(self.rtol, self.atol, equal=found.equal)
        return f"  {found}{'; ' if moves else ''}{moves}"


def compare(
    model: EditableModel,
    other: EditableModel,
    inputs: Any,
    *,
    samples: int,
    rtol: float,
    atol: float,
) -> Comparison:
    """Compare two models; see `Model.compare`."""
    if not isinstance(other, type(model)):
        raise ModelError(
            f"cannot compare with a {type_name(other)}; open it with geutil.model.open"
        )
    pairs = _paired_outputs(model, other)
    their_name = _paired_inputs(model, other)
    if inputs is None:
        if samples < 1:
            raise ModelError(f"samples is {samples}; draw at least one")
        # A fixed seed draws the same inputs each time.
        rng = np.random.default_rng(0)
        input_sets: Iterable[Mapping[str, Any]] = (
            _drawn(model, other, their_name, rng) for _ in range(samples)
        )
    else:
        input_sets = batches(inputs, model.inputs, ModelError)
    tally = Tally(rtol, atol)
    count = 0
    for count, arrays in enumerate(input_sets, 1):
        theirs = _run(other, {their_name[name]: a for name, a in arrays.items()})
        ours = _run(model, arrays)
        for name, name_ in pairs:
            tally.add(name, ours[name], theirs[name_], count - 1, rows_of(arrays))
    return Comparison(tally.differences, count, rtol, atol, tally.motions)


def _paired_outputs(
    model: EditableModel, other: EditableModel
) -> list[tuple[str, str]]:
    """Pair outputs by name, or one by one in order where no name is shared."""
    ours, theirs = list(model.outputs), list(other.outputs)
    if set(ours) == set(theirs):
        return [(name, name) for name in ours]
    if len(ours) == len(theirs) and not set(ours) & set(theirs):
        return list(zip(ours, theirs, strict=True))
    raise ModelError(
        f"the outputs do not match: {ours} and {theirs}",
        remedy=f"{Words('rename(outputs=...)')} or {Words('cut(outputs=...)')} one of "
        "the models",
    )


def _paired_inputs(model: EditableModel, other: EditableModel) -> dict[str, str]:
    """Pair inputs by name; where each has but one, these two. Refuse what fits not."""
    their_name = {name: name for name in model.inputs}
    if len(model.inputs) == len(other.inputs) == 1:
        their_name = dict(zip(model.inputs, other.inputs, strict=True))
    if set(their_name.values()) != set(other.inputs):
        raise ModelError(
            f"the inputs do not match: {list(model.inputs)} and {list(other.inputs)}",
            remedy=f"{Words('rename(inputs=...)')} one of the models",
        )
    for name, t in model.inputs.items():
        t_ = other.inputs[their_name[name]]
        if t.dtype != t_.dtype or not t.shape.is_compatible_with(t_.shape):
            raise ModelError(
                f"input '{name}' is {_described(t)} in one model and {_described(t_)} "
                "in the other, and nothing fits both"
            )
    return their_name


def _described(t: Tensor) -> str:
    return f"{t.dtype.name} {t.shape}"


def _drawn(
    model: EditableModel,
    other: EditableModel,
    their_name: Mapping[str, str],
    rng: np.random.Generator,
) -> Arrays:
    """Draw inputs that fit both: a size that one leaves open, the other may fix."""
    theirs = {name: other.inputs[name_] for name, name_ in their_name.items()}
    specs = {
        name: tf.TensorSpec(t.shape.merge_with(theirs[name].shape), t.dtype, name)
        for name, t in model.inputs.items()
    }
    bounds = bounds_of_indices(model.inputs)
    for name, bound in bounds_of_indices(theirs).items():
        bounds[name] = min(bound, bounds.get(name, bound))
    return random_inputs(specs, rng, _shared_batch(specs), bounds)


def _shared_batch(specs: Mapping[str, Any]) -> dict[str, int]:
    """Return a first dimension for inputs that have none, that of those that have."""
    # If the known ones agree on one, the unknown ones are taken to mean the same batch.
    ranked = {n: s.shape.as_list() for n, s in specs.items() if s.shape.rank}
    batch_sizes = {dims[0] for dims in ranked.values() if dims[0] is not None}
    if len(batch_sizes) != 1:
        return {}
    (batch,) = batch_sizes
    return {n: batch for n, dims in ranked.items() if dims[0] is None}


def _run(model: EditableModel, arrays: Mapping[str, Any]) -> Arrays:
    try:
        return model.run(**arrays)
    except tf.errors.OpError as error:
        raise ModelError(
            f"{model!r} fails on these inputs: {error.message}",
            remedy=f"pass {Words('inputs=', key='compare(inputs=')} that it can take",
        ) from error


BATCH = 3
"""Rows that are drawn where the first dimension is unknown."""
_PIXELS = 32
"""The length of unknown axes of images."""
_STEPS = 8
"""The length of other unknown axes, such as time."""
_LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))

Arrays = dict[str, np.ndarray[Any, Any]]


def random_inputs(
    inputs: Mapping[str, Tensor],
    rng: np.random.Generator,
    batch: Mapping[str, int] | None = None,
    bounds: Mapping[str, int] | None = None,
) -> Arrays:
    """Return a random array for each input."""
    # Floats and complex numbers are normal (mean 0, deviation 1), integers are 0 and 1,
    # of `uint8` from 0 to 255, strings are four letters long. An input with a bound
    # gets numbers from 0 to below it, of whatever dtype. An unknown first dimension is
    # 3, an unknown other one 32 in images (rank 4 and more), else 8; an unknown rank is
    # a vector's.
    arrays = {}
    for name, t in inputs.items():
        shape = [None] if t.shape.rank is None else t.shape.as_list()
        other = _PIXELS if len(shape) >= 4 else _STEPS
        sizes = [
            d if d is not None else other if i else BATCH for i, d in enumerate(shape)
        ]
        if batch is not None and name in batch:
            sizes[0] = batch[name]
        bound = (bounds or {}).get(name)
        if bound is not None and (t.dtype.is_integer or t.dtype.is_floating):
            whole = rng.integers(0, min(bound, t.dtype.max), sizes)
            # The fraction that is cut off must not change by rounding.
            between = 0.25 if t.dtype in (tf.float32, tf.float64) else 0
            arrays[name] = (whole + between).astype(t.dtype.as_numpy_dtype)
        else:
            arrays[name] = _draw(name, t.dtype, sizes, rng)
    return arrays


def _draw(
    name: str, dtype: Any, shape: list[int], rng: np.random.Generator
) -> np.ndarray[Any, Any]:
    if dtype == tf.string:
        letters = rng.choice(_LETTERS, [*shape, 4])
        return np.apply_along_axis(
            lambda row: "".join(row).encode(), -1, letters
        ).astype(object)
    if dtype == tf.bool:
        return rng.random(shape) < 0.5
    if dtype.is_complex:
        return np.asarray(
            rng.normal(size=shape) + 1j * rng.normal(size=shape), dtype.as_numpy_dtype
        )
    if dtype.is_floating:
        return np.asarray(rng.normal(size=shape), dtype.as_numpy_dtype)
    if dtype.is_integer:
        if dtype == tf.uint8:
            return rng.integers(0, 256, shape, np.uint8)
        bits = rng.integers(0, 2, shape)
        # Both are there, so that rows differ.
        bits.flat[:1] = 1 - bits.flat[-1:]
        return bits.astype(dtype.as_numpy_dtype)
    raise ModelError(
        f"there are no random values for input '{name}' of dtype {dtype.name}; pass "
        "some"
    )


_PASSING: Mapping[str, tuple[int, ...]] = {
    "BroadcastTo": (0,),
    "Cast": (0,),
    "EnsureShape": (0,),
    "ExpandDims": (0,),
    "Gather": (0,),
    "GatherV2": (0,),
    "Identity": (0,),
    "Pad": (0,),
    "Reshape": (0,),
    "ReverseV2": (0,),
    "Select": (1, 2),
    "SelectV2": (1, 2),
    "Slice": (0,),
    "Snapshot": (0,),
    "Split": (1,),
    "SplitV": (0,),
    "Squeeze": (0,),
    "StopGradient": (0,),
    "StridedSlice": (0,),
    "Tile": (0,),
    "Transpose": (0,),
    "Unpack": (0,),
}
"""Ops that hand numbers on as they are, and the inputs that these are."""
_JOINING = frozenset(("Concat", "ConcatV2", "Pack"))


def bounds_of_indices(inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """Return, for each input that is an index, the bound of its numbers."""
    # Tables are looked for behind ops that hand numbers on as they are or add a
    # constant, not in the bodies of functions. The least bound counts.
    bound_by_name = {}
    for name, t in inputs.items():
        if not (t.dtype.is_integer or t.dtype.is_floating):
            continue
        bound = min(_bounds(t), default=None)
        if bound is not None:
            bound_by_name[name] = bound
    return bound_by_name


def _bounds(t: Tensor) -> Iterator[int]:
    waiting, met = [(t, 0)], {(id(t), 0)}
    for tensor, added in waiting:
        for op in tensor.consumers():
            for index, read in enumerate(op.inputs):
                if read is not tensor:
                    continue
                bound = _bound(op, index)
                # That of a sum which wraps negative indices around is nothing.
                if bound is not None and bound > added:
                    yield bound - added
                for more in _handed_on(op, index):
                    for output in op.outputs:
                        if (id(output), added + more) not in met:
                            met.add((id(output), added + more))
                            waiting.append((output, added + more))


def _handed_on(op: Operation, index: int) -> list[int]:
    """Return [the number added to an input], or [] if its numbers are not passed on."""
    if index in _PASSING.get(op.type, ()) or op.type in _JOINING:
        return [0]
    if op.type in op_types.ADDITIONS:
        added = tf.get_static_value(op.inputs[1 - index])
        if added is not None and added.ndim == 0 and added == int(added):
            return [int(added)]
    return []


def _bound(op: Operation, index: int) -> int | None:
    """Return the bound that an op sets to the numbers of an input."""
    kind = op.type
    if kind.startswith("UnsortedSegment"):
        kind = "UnsortedSegment"
    operand_index, bound = _INDEXING.get(kind, (None, None))
    if bound is None or index != operand_index:
        return None
    limit = bound(op)
    return None if limit is None else int(limit)


def _dim(shape: tf.TensorShape | None, axis: int) -> int | None:
    if shape is None or shape.rank is None or not -shape.rank <= axis < shape.rank:
        return None
    dim: int | None = shape.as_list()[axis]
    return dim


def _of_gather_v2(op: Operation) -> int | None:
    axis = tf.get_static_value(op.inputs[2])
    return None if axis is None else _dim(op.inputs[0].shape, int(axis))


def _of_gather_nd(op: Operation) -> int | None:
    shape, depth = op.inputs[0].shape, _dim(op.inputs[1].shape, -1)
    if shape.rank is None or not depth:
        return None
    static_dims = [dim for dim in shape.as_list()[:depth] if dim is not None]
    return min(static_dims, default=None)


_INDEXING: Mapping[str, tuple[int, Callable[[Operation], int | None]]] = {
    "Gather": (1, lambda op: _dim(op.inputs[0].shape, 0)),
    "GatherNd": (1, _of_gather_nd),
    "GatherV2": (1, _of_gather_v2),
    "OneHot": (0, lambda op: tf.get_static_value(op.inputs[1])),
    "ResourceGather": (
        1,
        lambda op: _dim(resource_variables.shape_behind(op.inputs[0]), 0),
    ),
    "SparseSoftmaxCrossEntropyWithLogits": (
        1,
        lambda op: _dim(op.inputs[0].shape, -1),
    ),
    "UnsortedSegment": (1, lambda op: tf.get_static_value(op.inputs[2])),
}
"""Ops that index something: by which input, and how long it is."""
