"""The proof that a model with another batch size computes the same, by running both."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ModelError, Words
from geutil.graph.types import Operation, Tensor
from geutil.graph.walks import closure
from geutil.model.comparison import Arrays, bounds_of_indices, random_inputs
from geutil.model.core import EditableModel, M
from geutil.select.networks.outputs import Array, distances, farthest
from geutil.select.walks import get_forward_walk_ops

_EPS = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-23,
    "float64": 2.0**-52,
    "complex64": 2.0**-23,
    "complex128": 2.0**-52,
}
_TRIALS = 3
"""Perturbations of the inputs, of which the largest effect counts."""
_MARGIN = 32
"""Times the measured effect of one rounding that a result may be off."""
_PLAIN = 256
"""Units in the last place where no effect of rounding could be measured."""


def eps(dtype: Any) -> float:
    """Return the spacing of a dtype at 1, 0 for exact ones."""
    return _EPS.get(np.dtype(dtype).name, 0.0)


def same_bits(a: Array, b: Array) -> bool:
    """Return whether two arrays are the same but for signs of zero and NaN payloads."""
    return a.dtype == b.dtype and distance(a, b) == 0.0


def noise(
    run: Callable[[Arrays], Arrays],
    inputs: Arrays,
    results: Arrays,
    rng: np.random.Generator,
) -> dict[str, float]:
    """Measure how much each result changes when the inputs change in the last bit."""
    # Kernels add in another order for another batch size. Its effect on a result is of
    # the size of the effect of rounding the inputs: both are perturbations of one unit
    # in the last place, carried through the same ops.
    floats = [name for name, a in inputs.items() if eps(a.dtype)]
    if not floats:
        return dict.fromkeys(results, float("nan"))
    largest = dict.fromkeys(results, 0.0)
    for _ in range(_TRIALS):
        perturbed_inputs = dict(inputs)
        for name in floats:
            a = inputs[name]
            unit = eps(a.dtype) * rng.choice([-1.0, 1.0], a.shape)
            perturbed_inputs[name] = (a * (1 + unit)).astype(a.dtype)
        for name, changed in run(perturbed_inputs).items():
            if eps(changed.dtype) and changed.shape == results[name].shape:
                difference = np.abs(changed - results[name]).astype(np.float64)
                finite = difference[np.isfinite(difference)]
                largest[name] = max(largest[name], float(finite.max(initial=0.0)))
    return largest


def tolerance(references: Sequence[Array], measured: float) -> float:
    """Return how far a result may be from the references."""
    # Units of the last place; 256 where nothing could be measured. Exact dtypes are
    # compared exactly.
    unit = eps(references[0].dtype)
    if not unit:
        return 0.0
    finite = [np.abs(r[np.isfinite(r)]).astype(np.float64) for r in references]
    largest = max(float(f.max(initial=0.0)) for f in finite)
    if np.isnan(measured):
        return _PLAIN * unit * largest
    return _MARGIN * measured + 8 * unit * largest


_MOST_WINDOWS = 6
"""Windows of a batch that are compared, evenly spread: each costs a run."""


class RowVerdict(Enum):
    """The outcome of a comparison."""

    MATCHES = "the rows match, and differ from each other"
    SILENT = "the rows match, and are all the same"
    CONSTANT = "it is the same for any batch"
    DIFFERS = "a row does not match"
    UNGROUPED = "there is no axis with a row for each input"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison."""

    kind: RowVerdict
    row: int = 0  # The first row that was compared where it fails.
    distance: float = 0.0  # How far the row is off.
    allowed: float = 0.0  # How far rounding may take it.


def windows(size: int, old: int) -> list[Array]:
    """Return the rows that the old model is run on: at most six windows of `old` rows.

    A window that is longer than the batch begins anew at its start; of such there are
    two, so that rows change their places.

    Example:
        >>> [w.tolist() for w in windows(5, 2)]
        [[0, 1], [2, 3], [3, 4]]
        >>> [w.tolist() for w in windows(1, 2)]
        [[0, 0]]
        >>> [w.tolist() for w in windows(2, 3)]
        [[0, 1, 0], [1, 0, 1]]
    """
    return list(_windows(size, old))


def _windows(size: int, old: int) -> Iterator[Array]:
    starts = list(range(0, size, old))
    if size > old:
        starts[-1] = size - old
    elif size > 1:
        starts.append(1)
    picked = np.linspace(0, len(starts) - 1, min(len(starts), _MOST_WINDOWS))
    for index in dict.fromkeys(int(i) for i in picked):
        yield (starts[index] + np.arange(old)) % size


def judge(
    references: Sequence[Array],
    actual: Array,
    rows: Sequence[Array],
    size: int,
    rounding: float,
) -> Verdict:
    """Compare a result for a batch with results for windows of it."""
    first, old = references[0], len(rows[0])
    allowed = tolerance(references, rounding)
    axis = batch_axis(first.shape, actual.shape, old, size)
    if axis is None:
        constant = all(distance(r, actual) <= allowed for r in references)
        return Verdict(RowVerdict.CONSTANT if constant else RowVerdict.UNGROUPED)
    factor = first.shape[axis] // old
    for window, reference in zip(rows, references, strict=True):
        places = (window[:, None] * factor + np.arange(factor)).ravel()
        apart = distance(reference, np.take(actual, places, axis))
        if not apart <= allowed:
            return Verdict(RowVerdict.DIFFERS, int(window[0]), apart, allowed)
    # A batch of one row has nothing to mix up.
    telling = size == 1 or any(distance(first, r) > allowed for r in references)
    return Verdict(RowVerdict.MATCHES if telling else RowVerdict.SILENT)


def batch_axis(
    before: Sequence[int], after: Sequence[int], old: int, new: int
) -> int | None:
    """Return the one axis that is as much longer as the batch is."""
    if len(before) != len(after):
        return None
    pairs = zip(before, after, strict=True)
    differing = [i for i, (a, b) in enumerate(pairs) if a != b]
    if len(differing) != 1:
        return None
    axis = differing[0]
    grown = before[axis] % old == 0 and after[axis] == before[axis] // old * new
    return axis if grown else None


def distance(a: Array, b: Array) -> float:
    """Return the largest difference; infinite where shapes, NaNs or texts differ."""
    if a.shape != b.shape:
        return float("inf")
    return farthest(distances(a, b))[0] if a.size else 0.0


SKIP = Words("pass verify=False to take the model without the proof")


class ModelTrial:
    """Runs of a model and of the one with another batch size."""

    # `contrast` says how far floats that are drawn differ from row to row besides.

    def __init__(
        self,
        model: EditableModel,
        changed: EditableModel,
        batched: Iterable[str],
        samples: Mapping[str, Any] | None,
        contrast: float = 0.0,
    ) -> None:
        self.contrast = contrast
        self.model, self.changed = model, changed
        self.batched = frozenset(batched)
        unknown = [n for n in samples or () if n not in model.inputs]
        if unknown:
            raise ModelError(
                f"samples name no inputs: {unknown}; the inputs are "
                f"{list(model.inputs)}"
            )
        # numpy's own arrays of bytes lose zeros at the end.
        self.samples = {
            n: np.asarray(a, object if model.inputs[n].dtype == tf.string else None)
            for n, a in (samples or {}).items()
        }

    def of(self, outputs: Sequence[str]) -> ModelTrial:
        """Return a trial of the tensors called so in both graphs."""
        model, changed = (_with_outputs(m, outputs) for m in (self.model, self.changed))
        return ModelTrial(model, changed, self.batched, self.samples)

    def contrasting(self, contrast: float) -> ModelTrial:
        """Return the trial on rows that differ in mean and scale."""
        return ModelTrial(
            self.model, self.changed, self.batched, self.samples, contrast
        )

    def same_size(self, size: int) -> list[str]:
        """Return the outputs that are not the same at some size."""
        # The same is bit for bit, or up to rounding: Grappler writes a graph whose
        # shapes are known otherwise than one where they are not.
        inputs = self._inputs(size)
        before, after = self._old(inputs), self._new(inputs, size)
        wrong = [n for n in before if not same_bits(before[n], after[n])]
        if not wrong:
            return []
        self._refuse_random(inputs, before)
        rounding = noise(self._old, inputs, before, np.random.default_rng(1))
        return [
            n
            for n in wrong
            if not distance(before[n], after[n]) <= tolerance([before[n]], rounding[n])
        ]

    def rows(self, size: int, old: int) -> dict[str, Verdict]:
        """Compare each output row by row at another size."""
        inputs = self._inputs(size)
        after = self._new(inputs, size)
        rows = windows(size, old)
        before = [self._old(self._taken(inputs, window)) for window in rows]
        self._refuse_random(self._taken(inputs, rows[0]), before[0])
        rounding = noise(
            lambda arrays: self._old(self._taken(arrays, rows[0])),
            inputs,
            before[0],
            np.random.default_rng(1),
        )
        return {
            name: judge([b[name] for b in before], after[name], rows, size, measured)
            for name, measured in rounding.items()
        }

    def _inputs(self, size: int) -> Arrays:
        batch = dict.fromkeys(self.batched, size)
        inputs = self.model.inputs
        bounds = bounds_of_indices(inputs)
        arrays = random_inputs(inputs, np.random.default_rng(0), batch, bounds)
        for name in self.batched if self.contrast else ():
            a = arrays[name]
            if a.dtype.kind == "f" and name not in bounds:
                # Windows begin at any row, and seven come before one repeats.
                step = self.contrast * (np.arange(size) % 7 - 3.0)
                step = step.reshape(-1, *[1] * (a.ndim - 1))
                arrays[name] = (a * step + step).astype(a.dtype)
        for name, rows in self.samples.items():
            arrays[name] = rows
            if name in self.batched:
                arrays[name] = np.take(rows, np.arange(size) % len(rows), 0)
        return arrays

    def _taken(self, inputs: Arrays, rows: Any) -> Arrays:
        return {
            n: np.take(a, rows, 0) if n in self.batched else a
            for n, a in inputs.items()
        }

    def _old(self, inputs: Arrays) -> Arrays:
        try:
            return self.model.run(**inputs)
        except tf.errors.OpError as error:
            raise ModelError(
                f"{self.model!r} fails on the inputs it was tried on, so that nothing "
                f"can be proved: {error.message}",
                remedy=Words(f"pass samples={{input: rows}}, or {SKIP}"),
            ) from error

    def _new(self, inputs: Arrays, size: int) -> Arrays:
        """Run the changed model at a size; refuse a failure or an unexpected shape."""
        try:
            results = self.changed.run(**inputs)
        except tf.errors.OpError as error:
            raise ModelError(
                f"{self.model!r} fails at batch size {size}: {error.message}; the op "
                "named there holds on to the old batch size: rewrite it, or cut the "
                "model around it"
            ) from error
        for name, t in self.changed.outputs.items():
            if not t.shape.is_compatible_with(results[name].shape):
                raise ModelError(
                    f"output '{name}' of {self.model!r} has shape "
                    f"{results[name].shape} at batch size {size}, where {t.shape} is "
                    f"expected: '{t.op.name}' ({t.op.type}) or what is behind it holds "
                    "on to the old batch size; cut the model in front of it"
                )
        return results

    def _refuse_random(self, inputs: Arrays, before: Arrays) -> None:
        again = self._old(inputs)
        if not all(same_bits(before[name], again[name]) for name in before):
            raise ModelError(
                f"{self.model!r} computes something else each time it runs, so that "
                f"nothing can be proved; {SKIP}"
            )


def _with_outputs(model: M, names: Sequence[str]) -> M:
    program = model.program()
    program.outputs = {name: name for name in names}
    return model.derived(program, alone=True)


_WRITES = re.compile(
    r"Assign|^(Resource)?(Sparse)?Apply|^ResourceScatter|^Scatter(Add|Sub|Update)$"
    r"|^LookupTable(Insert|Import|Remove)|^InitializeTable|^Write|^Save|^Print"
    r"|PyFunc|Enqueue|Dequeue|StackPush|StackPop"
)
_FIRST_BEHIND = 24
"""Tensors behind an output that are looked at first; twice as many each time after."""


def prove(
    model: EditableModel,
    changed: EditableModel,
    batched: Sequence[str],
    old: int | None,
    new: int | None,
    samples: Mapping[str, Any] | None,
) -> None:
    """Run a model and the one with another batch size, and compare."""
    # At the old size the results are the same, and at others each row equals the old
    # model's result for it, up to rounding.
    _refuse_writes(model)
    trial = ModelTrial(model, changed, batched, samples)
    if old is None:
        sizes = [new or 1]
    elif new is None:
        sizes = list(dict.fromkeys([old, 2 * old + 1, 1]))
    else:
        sizes = [new]
    for size in sizes:
        if old is None or size == old:
            for name in trial.same_size(size):
                raise _wrong(model, name, f"at batch size {size} it is not the same")
        else:
            for name, verdict in trial.rows(size, old).items():
                _settle(trial, name, verdict, size, old)


def _refuse_writes(model: EditableModel) -> None:
    graph_def = model.program().graph_def
    bodies = [f.node_def for f in graph_def.library.function]
    writers = [
        f"'{node.name}' ({node.op})"
        for nodes in [graph_def.node, *bodies]
        for node in nodes
        if _WRITES.search(node.op)
    ]
    if writers:
        raise ModelError(
            f"{model!r} cannot be run to prove that the batch size may change, since a "
            f"run has effects: {', '.join(writers[:5])}; {SKIP}, or use "
            "strip_training() first"
        )


def _settle(
    trial: ModelTrial, name: str, verdict: Verdict, size: int, old: int
) -> None:
    """Accept a verdict, or raise its error."""
    if verdict.kind is RowVerdict.DIFFERS:
        raise _wrong(
            trial.model,
            name,
            f"at batch size {size}, row {verdict.row} is {verdict.distance:.3g} away "
            "from what the old model makes of it (rounding explains "
            f"{verdict.allowed:.3g}): rows of the batch depend on each other, or a "
            f"constant holds on to the old batch. If that is meant, {SKIP}",
        )
    constant = verdict.kind is RowVerdict.CONSTANT and not _grows(trial.model, name)
    if verdict.kind in (RowVerdict.UNGROUPED, RowVerdict.CONSTANT) and not constant:
        raise _wrong(
            trial.model,
            name,
            f"the shape does not tell which row of it comes from which input at batch "
            f"size {size}, so nothing can be proved; {SKIP}",
        )
    # An output whose rows are all alike may be proved by the tensors before it.
    if verdict.kind is RowVerdict.SILENT and not _proved_behind(trial, name, size, old):
        telling = _for_contrasts(trial, name, size, old)
        if telling is not None:
            _settle(trial, name, telling, size, old)
            return
        rows = Words(
            "pass samples={input: rows} that make a difference, or verify=False to "
            "take the model without the proof"
        )
        raise _wrong(
            trial.model,
            name,
            f"all rows that were tried come out the same, which proves nothing; {rows}",
        )


def _for_contrasts(
    trial: ModelTrial, output: str, size: int, old: int
) -> Verdict | None:
    """Return the verdict on rows so different that an output shows it, if any are."""
    for contrast in _CONTRASTS:
        try:
            verdict = trial.contrasting(contrast).rows(size, old)[output]
        except ModelError:
            continue
        if verdict.kind is not RowVerdict.SILENT:
            return verdict
    return None


_CONTRASTS = (10.0, 1000.0)
"""How far rows differ in mean and scale where random ones come out the same.

Measured: tests/model/test_batch_size.py, `SILENT`. A band from 4 to 9 shows by 10 and
by neither 1 nor 100, a threshold of 500 by 1000 and by nothing less.
"""


def _proved_behind(trial: ModelTrial, output: str, size: int, old: int) -> bool:
    """Return whether the tensors behind an output match, up to where rows differ."""
    start = trial.model.outputs[output]
    inputs = [t.name for t in trial.model.inputs.values()]
    most = _FIRST_BEHIND
    verdicts: dict[str, Verdict] = {}
    while True:
        behind = _behind(start, trial.model, trial.changed, most)
        names = dict.fromkeys(name for before in behind.values() for name in before)
        new = [name for name in names if name not in verdicts]
        if not new:
            return False
        verdicts |= trial.of(new).rows(size, old)
        reached = _silent_behind(start.name, behind, verdicts)
        kinds = (RowVerdict.MATCHES, RowVerdict.SILENT)
        fine = {n for n, v in verdicts.items() if v.kind in kinds and n not in inputs}
        for before in (behind[name] for name in reached if name in behind):
            if not before or not fine.issuperset(before):
                return False
        if all(name in behind for name in reached):
            return True
        most *= 2


def _silent_behind(
    start: str, behind: Mapping[str, list[str]], verdicts: Mapping[str, Verdict]
) -> dict[str, None]:
    """Return a tensor and those behind it up to where rows differ."""

    def silent(name: str) -> list[str]:
        before = behind.get(name, ())
        return [n for n in before if verdicts[n].kind is RowVerdict.SILENT]

    return closure([start], silent)


def _growing(model: EditableModel) -> frozenset[Operation]:
    return frozenset(get_forward_walk_ops([t.op for t in model.inputs.values()]))


def _grows(model: EditableModel, output: str) -> bool:
    """Return whether an output depends on the inputs."""
    return model.outputs[output].op in _growing(model)


def _behind(
    start: Tensor, model: EditableModel, changed: EditableModel, most: int
) -> dict[str, list[str]]:
    """Return the floating-point tensors behind one that depend on data."""
    growing = _growing(model)
    remaining_names = {op.name for op in changed.graph.get_operations()}
    behind: dict[str, list[str]] = {}
    waiting = [start]
    for t in waiting:
        inputs = list(t.op.inputs)
        # Tensors that the new model lacks are looked through.
        for u in inputs:
            if u.op.name not in remaining_names:
                inputs += u.op.inputs
        before = [
            u
            for u in inputs
            if u.dtype.is_floating and u.op in growing and u.op.name in remaining_names
        ]
        behind[t.name] = [u.name for u in before]
        for u in before:
            if u.name not in behind and len(waiting) < most:
                waiting.append(u)
    return behind


def _wrong(model: EditableModel, output: str, what: str) -> ModelError:
    return ModelError(
        f"the batch size of {model!r} cannot be changed: of output '{output}', {what}"
    )
