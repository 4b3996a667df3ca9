"""Reports of a fold: batch norms folded or refused, and outputs before and after.

`geutil.model.comparison` compares element by element within tolerances, which does not
suit a fold: rounding changes values near zero by many times their size. Both use the
distances of `geutil.select.networks.outputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, GeutilError
from geutil.graph.types import type_name
from geutil.lazy import Shown
from geutil.select.networks.outputs import Array, Motion, Tally, rows_of, widened
from geutil.select.selections import with_layer


@dataclass(frozen=True)
class Folded:
    """A batch norm that was folded.

    Attributes:
        norm: the batch norm, by name.
        layer: the layer that it was folded into, by the name of its op.
        layer_type: the type of that op.
        into: the op that now computes both.
        forward: whether the layer comes after the norm.
        signature: of a model, the signature whose graph it is in; "" for graphs.
        keras_layer: the path of the Keras layer that the norm is in; "" if none is.

    Names in the body of a function begin with the name of the function and a slash.
    """

    norm: str
    layer: str
    layer_type: str
    into: str
    forward: bool = False
    signature: str = ""
    keras_layer: str = ""


@dataclass(frozen=True)
class Refused:
    """A batch norm that was left unchanged.

    Attributes:
        norm: the batch norm, by name.
        reason: the reason.
        op: the op that prevents the fold.
        signature: of a model, the signature whose graph it is in; "" for graphs.
        keras_layer: the path of the Keras layer that the norm is in; "" if none is.
    """

    norm: str
    reason: str
    op: str
    signature: str = ""
    keras_layer: str = ""


@dataclass(frozen=True)
class FoldReport(Shown):
    """Every batch norm of a graph: folded, or refused with the reason.

    Attributes:
        folded: the batch norms that were folded, in the order of the graph; a norm of
            several layers that are added, concatenated or stacked, once for each layer.
        refused: those that were not.
        step: the variable that counts the training steps, if there is one.
    """

    folded: tuple[Folded, ...]
    refused: tuple[Refused, ...]
    step: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        # A norm that several layers take in has an entry for each.
        folded = len({(entry.signature, entry.norm) for entry in self.folded})
        refused = len(self.refused)
        entries: list[Folded | Refused] = [*self.folded, *self.refused]
        # Signatures may hold norms of one name: with several, entries name theirs.
        several = len({entry.signature for entry in entries}) > 1

        def label(entry: Folded | Refused) -> str:
            name = with_layer(entry.keras_layer, entry.norm)
            return f"{entry.signature}: {name}" if several else name

        total = folded + refused
        lines = [f"{folded} of {total} batch norm(s) folded, {refused} refused"]
        if self.folded:
            width = max(len(label(entry)) for entry in self.folded)
            lines.append("folded:")
            lines += [
                f"  {label(entry):<{width}}  into {entry.layer_type} '{entry.layer}'"
                + (" behind it" if entry.forward else "")
                for entry in self.folded
            ]
        if self.refused:
            lines.append("refused:")
            lines += [
                f"  {label(entry)}: '{entry.op}' {entry.reason}"
                for entry in self.refused
            ]
        return "\n".join(lines)


class CheckError(GeutilError, ValueError):
    """The results of two models cannot be compared."""


@dataclass(frozen=True)
class OutputDifference:
    """The difference between two models in one output.

    Attributes:
        output: the name of the output.
        largest: the largest absolute difference of two elements, over all samples.
        span: the output's range before folding: its largest element less its smallest,
            over all samples.
        index: the index of the element with the largest difference.
        sample: the sample with that element, counted from 0.
        motion: how much the output varies with the samples; None if unknown.
    """

    output: str
    largest: float
    span: float
    index: tuple[int, ...]
    sample: int
    motion: Motion | None = None

    @property
    def relative(self) -> float:
        """The largest difference relative to the output's range.

        Infinite if the range is 0 and the difference is not.
        """
        if not self.largest:
            return 0.0
        return self.largest / self.span if self.span else float("inf")


@dataclass(frozen=True)
class CheckResult:
    """The differences between the outputs before and after folding.

    Attributes:
        outputs: one entry for each output, in order.
        samples: the number of samples that were run.

    Example:
        >>> from geutil.batchnorm import CheckResult, OutputDifference
        >>> print(CheckResult((OutputDifference("y", 2e-6, 4.0, (0, 1), 0),), 1))
        largest difference 5e-07 of an output's range, 1 sample(s)
          y  5e-07 of range 4: 2e-06 at [0, 1] of sample 0
    """

    outputs: tuple[OutputDifference, ...]
    samples: int

    @property
    def relative(self) -> float:
        """The largest difference of all outputs, relative to their ranges."""
        return max(entry.relative for entry in self.outputs)

    def __str__(self) -> str:
        width = max(len(entry.output) for entry in self.outputs)
        share = f"largest difference {self.relative:.2g} of an output's range"
        lines = [f"{share}, {self.samples} sample(s)"]
        lines += [
            f"  {entry.output:<{width}}  {entry.relative:.2g} of range {entry.span:.4g}"
            f": {entry.largest:.2g} at {list(entry.index)} of sample {entry.sample}"
            f"{'; ' if str(entry.motion or '') else ''}{entry.motion or ''}"
            for entry in self.outputs
        ]
        return "\n".join(lines)


def check(
    before: Any, after: Any, samples: Mapping[str, Any] | Iterable[Mapping[str, Any]]
) -> CheckResult:
    """Run two models on the same samples; return the differences of their outputs.

    Folding edits a model in place, so first make a function of it: `before =
    model.to_function()`.

    Args:
        before: a `geutil.model.Model`, or anything that is called with the inputs by
            name and returns a tensor, or a list or mapping of tensors: the result of
            `Model.to_function`, a `tf.function`, a ConcreteFunction, or a function of
            your own that runs a Session.
        after: likewise.
        samples: the inputs by name, or several of these.

    Returns:
        The largest difference of each output, relative to its range.

    Raises:
        ArgumentTypeError: a model is none of these, a sample is not a mapping, or an
            output is not an array of numbers.
        CheckError: there are no samples; the outputs differ in names, dtypes or shapes;
            or one holds NaN or infinite values.

    Cost: one run of each model for each sample.

    Example:
        >>> import tensorflow as tf
        >>> from geutil import model
        >>> from geutil.batchnorm import check, fold_batch_norms
        >>> kernel = tf.random.stateless_normal([3, 3, 3, 4], seed=(1, 2))
        >>> four = tf.constant([0.5, 1.0, 1.5, 2.0])
        >>> @tf.function(input_signature=[tf.TensorSpec([None, 8, 8, 3], name="x")])
        ... def f(x):
        ...     y = tf.nn.conv2d(x, kernel, 1, "SAME")
        ...     y = tf.nn.batch_normalization(y, four, four, four, four, 1e-3)
        ...     return {"y": tf.nn.relu(y)}
        >>> m = model.open(f)
        >>> before = m.to_function()
        >>> len(fold_batch_norms(m).folded)
        1
        >>> x = tf.random.stateless_normal([2, 8, 8, 3], seed=(3, 4))
        >>> check(before, m, {"x": x}).relative < 1e-6
        True
    """
    run, run_ = _runner(before), _runner(after)
    tally, ends = Tally(), dict[str, list[float]]()
    count = 0
    for count, sample in enumerate(_listed(samples), 1):
        if not isinstance(sample, Mapping):
            raise _wrong("a sample is a mapping from input names to values", sample)
        ours, theirs = run(sample), run_(sample)
        _check_names(ours, theirs)
        for name, a in ours.items():
            _check_values(name, a, theirs[name], count - 1)
            tally.add(name, theirs[name], a, count - 1, rows_of(sample))
            # An empty output has no extremes.
            if a.size:
                ends.setdefault(name, []).extend((float(a.min()), float(a.max())))
    if not tally.differences:
        what = "the models have no outputs" if count else "samples holds nothing"
        raise CheckError(f"{what}; there is nothing to compare")
    entries = [
        OutputDifference(
            name,
            found.absolute,
            max(ends[name]) - min(ends[name]) if name in ends else 0.0,
            found.index or (),
            found.sample,
            tally.motions[name],
        )
        for name, found in tally.differences.items()
    ]
    return CheckResult(tuple(entries), count)


def _listed(samples: Any) -> Iterable[Any]:
    if isinstance(samples, Mapping):
        return [samples]
    if isinstance(samples, str | bytes) or not isinstance(samples, Iterable):
        raise _wrong("samples are mappings from input names to values", samples)
    return samples


def _runner(model: Any) -> Callable[[Mapping[str, Any]], dict[str, Array]]:
    run = getattr(model, "run", model)
    if isinstance(model, tf.Graph | tf.compat.v1.Session) or not callable(run):
        raise _wrong(
            "a model is run or called with its inputs by name (open a graph with "
            "geutil.model.open, or pass a function that runs its Session)",
            model,
        )
    return lambda sample: _arrays(run(**sample))


def _wrong(expected: str, value: Any) -> ArgumentTypeError:
    return ArgumentTypeError(f"{expected}; got {type_name(value)}")


def _arrays(results: Any) -> dict[str, Array]:
    """Return results by name; those of a list by their place in it."""
    if isinstance(results, Mapping):
        named = {str(name): value for name, value in results.items()}
    elif isinstance(results, list | tuple):
        named = {f"output_{i}": value for i, value in enumerate(results)}
    else:
        named = {"output_0": results}
    arrays = {name: np.asarray(value) for name, value in named.items()}
    for name, array in arrays.items():
        number = array.dtype.kind in "fiub" or tf.as_dtype(array.dtype).is_floating
        if not number:
            raise _wrong(f"output '{name}' is to be an array of numbers", named[name])
    return arrays


def _check_names(ours: Mapping[str, Array], theirs: Mapping[str, Array]) -> None:
    if set(ours) != set(theirs):
        raise CheckError(
            f"the outputs differ: {list(ours)} before and {list(theirs)} after; "
            "compare models with outputs of the same names"
        )


def _check_values(name: str, a: Array, b: Array, sample: int) -> None:
    if a.dtype != b.dtype or a.shape != b.shape:
        raise CheckError(
            f"output '{name}' is {a.dtype} {list(a.shape)} before and {b.dtype} "
            f"{list(b.shape)} after, in sample {sample}"
        )
    for value, when in ((a, "before"), (b, "after")):
        if not np.isfinite(widened(value)).all():
            raise CheckError(
                f"output '{name}' has NaN or infinite values {when} folding, in sample "
                f"{sample}; pass samples that the model can take"
            )
