"""Outputs of two models side by side: how far they are apart, and where.

Element by element within tolerances; `geutil.batchnorm.checking` compares relative to
the range of an output, and refuses what this reports, such as NaN or another dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ModelError, Words
from geutil.graph.types import Tensor, type_name
from geutil.model.core import EditableModel
from geutil.model.random_samples import Arrays, bounds_of_indices, random_inputs
from geutil.notebook_display import Shown
from geutil.select.networks.data import batches
from geutil.select.networks.outputs import Difference, Motion, Tally, rows_of


@dataclass(frozen=True)
class Comparison(Shown):
    """The outputs of two models for the same inputs, compared.

    Its truth value is `equal`, so that `assert model.compare(other)` reads well.

    Attributes:
        differences: by output of the first model, where the two are farthest apart.
        samples: how many inputs were tried.
        rtol: the relative tolerance.
        atol: the absolute tolerance.
        motions: how much each output of the other model moves with the samples: where
            that is no more than the tolerances allow, the comparison proves nothing.
    """

    differences: Mapping[str, Difference]
    samples: int
    rtol: float
    atol: float
    motions: Mapping[str, Motion] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Tell whether all outputs agree within the tolerances, for all inputs."""
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
        head = (
            f"{verdict} on {self.samples} samples (rtol {self.rtol:g}, "
            f"atol {self.atol:g})"
        )
        return "\n".join([head, *map(self._line, self.differences)])

    def _line(self, name: str) -> str:
        """Return how far an output is apart, and how much it moves."""
        moves = ""
        if name in self.motions:
            moves = self.motions[name].told(self.rtol, self.atol)
        return f"  {self.differences[name]}{'; ' if moves else ''}{moves}"


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
    """Draw inputs that fit both: what one does not know of a shape, the other may."""
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
