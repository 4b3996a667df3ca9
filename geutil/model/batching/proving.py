"""The proof that a model with another batch size computes the same, by running both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from geutil.model.batching.rounding import noise, same_bits, tolerance
from geutil.model.errors import ModelError
from geutil.model.samples import Arrays, random_inputs

if TYPE_CHECKING:
    from geutil.model.model import Model

_WRITES = re.compile(
    r"Assign|^(Resource)?(Sparse)?Apply|^ResourceScatter|^Scatter(Add|Sub|Update)$"
    r"|^LookupTable(Insert|Import|Remove)|^InitializeTable|^Write|^Save|^Print"
    r"|PyFunc|Enqueue|Dequeue|StackPush|StackPop"
)
_MOST_WINDOWS = 6
SKIP = "pass verify=False to take the model without the proof"


def prove(
    model: Model,
    changed: Model,
    batched: Sequence[str],
    old: int | None,
    new: int | None,
    samples: Mapping[str, Any] | None,
) -> None:
    """Run a model and the one with another batch size, and compare.

    At the old size the results are the same bit for bit. At others each row is what the
    old model makes of it, up to rounding.

    Args:
        model: the model.
        changed: the one with another batch size.
        batched: the inputs with a batch axis.
        old: the old size, None if any.
        new: the new size, None if any.
        samples: rows to run on, for some inputs; the others are drawn.

    Raises:
        ModelError: they differ, or cannot be compared.

    Cost: some ten executions.
    """
    _refuse_writes(model)
    trial = _Trial(model, changed, batched, samples)
    if old is None:
        sizes = [new or 1]
    elif new is None:
        sizes = list(dict.fromkeys([old, 2 * old + 1, 1]))
    else:
        sizes = [new]
    for size in sizes:
        if size == (old or size):
            trial.same_size(size)
        else:
            trial.rows(size, old or size)


def _refuse_writes(model: Model) -> None:
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
            f"{model!r} cannot be run to prove that the batch size may change, because a "
            f"run has effects: {', '.join(writers[:5])}; {SKIP}, or use "
            "model.strip_training() first"
        )


class _Trial:
    def __init__(
        self,
        model: Model,
        changed: Model,
        batched: Sequence[str],
        samples: Mapping[str, Any] | None,
    ) -> None:
        self._model, self._changed = model, changed
        self._batched = frozenset(batched)
        self._samples = {n: np.asarray(a) for n, a in (samples or {}).items()}
        unknown = [n for n in self._samples if n not in model.inputs]
        if unknown:
            raise ModelError(
                f"samples name no inputs: {unknown}; the inputs are {list(model.inputs)}"
            )
        self._rng = np.random.default_rng(0)

    def same_size(self, size: int) -> None:
        """Compare at a size that both take."""
        inputs = self._inputs(size)
        before = self._old(inputs)
        after = self._new(inputs, size)
        for name, wanted in before.items():
            if not same_bits(wanted, after[name]):
                self._refuse_random(inputs, before)
                raise self._wrong(name, f"at batch size {size} it is not the same")

    def rows(self, size: int, old: int) -> None:
        """Compare row by row at another size."""
        inputs = self._inputs(size)
        after = self._new(inputs, size)
        windows = list(_windows(size, old))
        before = [self._old(self._taken(inputs, w)) for w in windows]
        rounding = noise(
            lambda arrays: self._old(self._taken(arrays, windows[0])),
            inputs,
            before[0],
            self._rng,
        )
        for name in self._model.outputs:
            references = [results[name] for results in before]
            self._compare(name, references, after[name], windows, size, rounding[name])

    def _compare(
        self,
        name: str,
        references: Sequence[np.ndarray[Any, Any]],
        found: np.ndarray[Any, Any],
        windows: Sequence[np.ndarray[Any, Any]],
        size: int,
        rounding: float,
    ) -> None:
        first, old = references[0], len(windows[0])
        allowed = tolerance(references, rounding)
        axis = _batch_axis(first.shape, found.shape, old, size)
        if axis is None:
            if all(_distance(r, found) <= allowed for r in references):
                return
            raise self._wrong(
                name,
                f"its shape is {first.shape} at batch size {old} and {found.shape} at "
                f"{size}: it has no axis with a row for each input, so its rows cannot "
                f"be compared; {SKIP}",
            )
        factor = first.shape[axis] // old
        for window, wanted in zip(windows, references, strict=True):
            rows = (window[:, None] * factor + np.arange(factor)).ravel()
            distance = _distance(wanted, np.take(found, rows, axis))
            if not distance <= allowed:
                raise self._wrong(
                    name,
                    f"at batch size {size}, row {window[0]} differs by {distance:.3g} "
                    f"from what the old model makes of it (rounding: {allowed:.3g}); "
                    "rows of the batch depend on each other, or a constant holds on to "
                    f"the old batch. If that is meant, {SKIP}",
                )
        if size > 1 and all(_distance(first, r) <= allowed for r in references):
            raise self._wrong(
                name,
                "it is the same for all rows that were tried, which proves nothing; pass "
                f"samples={{input: rows}} that differ in it, or {SKIP.removeprefix('pass ')}",
            )

    def _inputs(self, size: int) -> Arrays:
        batch = dict.fromkeys(self._batched, size)
        arrays = random_inputs(self._model.inputs, self._rng, batch)
        for name, given in self._samples.items():
            arrays[name] = given
            if name in self._batched:
                arrays[name] = np.take(given, np.arange(size) % len(given), 0)
        return arrays

    def _taken(self, inputs: Arrays, rows: Any) -> Arrays:
        return {
            n: np.take(a, rows, 0) if n in self._batched else a
            for n, a in inputs.items()
        }

    def _old(self, inputs: Arrays) -> Arrays:
        try:
            return self._model.run(**inputs)
        except tf.errors.OpError as error:
            raise ModelError(
                f"{self._model!r} fails on the inputs it was tried on, so that nothing "
                f"can be proved: {error.message}; pass samples={{input: rows}}, or {SKIP}"
            ) from error

    def _new(self, inputs: Arrays, size: int) -> Arrays:
        try:
            return self._changed.run(**inputs)
        except tf.errors.OpError as error:
            raise ModelError(
                f"{self._model!r} fails at batch size {size}: {error.message}; an op "
                "there holds on to the old batch size: rewrite it, or cut the model"
            ) from error

    def _refuse_random(self, inputs: Arrays, before: Arrays) -> None:
        again = self._old(inputs)
        if not all(same_bits(before[name], again[name]) for name in before):
            raise ModelError(
                f"{self._model!r} computes something else each time it runs, so that "
                f"nothing can be proved; {SKIP}"
            )

    def _wrong(self, name: str, what: str) -> ModelError:
        return ModelError(
            f"the batch size of {self._model!r} cannot be changed: of output '{name}', "
            f"{what}"
        )


def _windows(size: int, old: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the rows that the old model is run on: at most six windows, ends included."""
    starts = list(range(0, size, old))
    if size > old:
        starts[-1] = size - old
    picked = np.linspace(0, len(starts) - 1, min(len(starts), _MOST_WINDOWS))
    for index in dict.fromkeys(int(i) for i in picked):
        yield (starts[index] + np.arange(old)) % size


def _batch_axis(
    before: Sequence[int], after: Sequence[int], old: int, new: int
) -> int | None:
    """Return the one axis that is as much longer as the batch is."""
    if len(before) != len(after):
        return None
    differing = [
        i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b
    ]
    if len(differing) != 1:
        return None
    axis = differing[0]
    grown = before[axis] % old == 0 and after[axis] == before[axis] // old * new
    return axis if grown else None


def _distance(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Return the largest difference; infinite where shapes, NaNs or texts differ."""
    if a.shape != b.shape:
        return float("inf")
    if not a.size or same_bits(a, b):
        return 0.0
    if a.dtype == object or a.dtype == bool:
        return float("inf")
    x, y = _wide(a), _wide(b)
    equal = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        differences = np.where(equal, 0.0, np.abs(x - y))
    return float("inf") if np.isnan(differences).any() else float(differences.max())


def _wide(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return a.astype(np.complex128 if np.iscomplexobj(a) else np.float64)
