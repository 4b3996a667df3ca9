"""Comparing what two models compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph.kinds import Tensor, type_name
from geutil.model.comparison.differences import Difference, difference
from geutil.model.comparison.indices import bounds_of_indices
from geutil.model.comparison.samples import Arrays, random_inputs
from geutil.model.core import EditableModel
from geutil.model.errors import ModelError


@dataclass(frozen=True)
class Comparison:
    """What two models computed from the same inputs.

    Its truth value is `equal`, so that `assert model.compare(other)` reads well.

    Attributes:
        differences: by output of the first model, where the two are farthest apart.
        samples: how many inputs were tried.
        rtol: the relative tolerance.
        atol: the absolute tolerance.
    """

    differences: Mapping[str, Difference]
    samples: int
    rtol: float
    atol: float

    @property
    def equal(self) -> bool:
        """Tell whether all outputs agree within the tolerances, for all inputs."""
        return all(d.equal for d in self.differences.values())

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "different"
        head = (
            f"{verdict} on {self.samples} samples (rtol {self.rtol:g}, "
            f"atol {self.atol:g})"
        )
        return "\n".join([head, *(f"  {d}" for d in self.differences.values())])


def compare(
    model: EditableModel,
    other: EditableModel,
    inputs: Mapping[str, Any] | Iterable[Mapping[str, Any]] | None,
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
    _check_inputs(model, other)
    if inputs is None:
        if samples < 1:
            raise ModelError(f"samples is {samples}; draw at least one")
        rng = np.random.default_rng(0)
        tried: Iterable[Mapping[str, Any]] = (
            _drawn(model, other, rng) for _ in range(samples)
        )
    else:
        tried = [inputs] if isinstance(inputs, Mapping) else inputs
    found: dict[str, Difference] = {}
    count = 0
    for count, arrays in enumerate(tried, 1):
        ours, theirs = _run(model, arrays), _run(other, arrays)
        for name, name_ in pairs:
            new = difference(
                name,
                ours[name],
                theirs[name_],
                sample=count - 1,
                rtol=rtol,
                atol=atol,
            )
            found[name] = new.worse(found.get(name))
    if not count:
        raise ModelError("inputs holds nothing; pass one dictionary of arrays at least")
    return Comparison(found, count, rtol, atol)


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
        f"the outputs do not match: {ours} and {theirs}; rename(outputs=...) or "
        "cut(outputs=...) one of the models"
    )


def _check_inputs(model: EditableModel, other: EditableModel) -> None:
    if set(model.inputs) != set(other.inputs):
        raise ModelError(
            f"the inputs do not match: {list(model.inputs)} and {list(other.inputs)}; "
            "rename(inputs=...) one of the models"
        )
    for name, t in model.inputs.items():
        t_ = other.inputs[name]
        if t.dtype != t_.dtype or not t.shape.is_compatible_with(t_.shape):
            raise ModelError(
                f"input '{name}' is {_described(t)} in one model and {_described(t_)} "
                "in the other, and nothing fits both"
            )


def _described(t: Tensor) -> str:
    return f"{t.dtype.name} {t.shape}"


def _drawn(
    model: EditableModel, other: EditableModel, rng: np.random.Generator
) -> Arrays:
    """Draw inputs that fit both: what one does not know of a shape, the other may."""
    specs = {
        name: tf.TensorSpec(t.shape.merge_with(other.inputs[name].shape), t.dtype, name)
        for name, t in model.inputs.items()
    }
    bounds = bounds_of_indices(model.inputs)
    for name, bound in bounds_of_indices(other.inputs).items():
        bounds[name] = min(bound, bounds.get(name, bound))
    return random_inputs(specs, rng, _shared_batch(specs), bounds)


def _shared_batch(specs: Mapping[str, Any]) -> dict[str, int]:
    """Return a first dimension for inputs that have none, that of those that have.

    If the known ones agree on one, the unknown ones are taken to mean the same batch.
    """
    ranked = {n: s.shape.as_list() for n, s in specs.items() if s.shape.rank}
    known = {dims[0] for dims in ranked.values() if dims[0] is not None}
    if len(known) != 1:
        return {}
    (batch,) = known
    return {n: batch for n, dims in ranked.items() if dims[0] is None}


def _run(model: EditableModel, arrays: Mapping[str, Any]) -> Arrays:
    try:
        return model.run(**arrays)
    except tf.errors.OpError as error:
        raise ModelError(
            f"{model!r} fails on these inputs: {error.message}; pass inputs= "
            "that it can take"
        ) from error
