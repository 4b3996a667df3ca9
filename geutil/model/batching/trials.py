"""Runs of two models on the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.model.batching.judging import Verdict, distance, judge, windows
from geutil.model.batching.rounding import noise, same_bits, tolerance
from geutil.model.comparison.indices import bounds_of_indices
from geutil.model.comparison.samples import Arrays, random_inputs
from geutil.model.core import EditableModel, M
from geutil.model.errors import ModelError

SKIP = "pass verify=False to take the model without the proof"


class Trial:
    """Runs of a model and of the one with another batch size.

    Args:
        model: the model.
        changed: the one with another batch size.
        batched: the inputs with a batch axis.
        samples: rows to run on, for some inputs; the others are drawn.

    Raises:
        ModelError: `samples` names what is no input.
    """

    def __init__(
        self,
        model: EditableModel,
        changed: EditableModel,
        batched: Iterable[str],
        samples: Mapping[str, Any] | None,
    ) -> None:
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

    def of(self, outputs: Sequence[str]) -> Trial:
        """Return a trial of the tensors called so in both graphs."""
        model, changed = (_with_outputs(m, outputs) for m in (self.model, self.changed))
        return Trial(model, changed, self.batched, self.samples)

    def same_size(self, size: int) -> list[str]:
        """Return the outputs that are not the same at some size.

        The same is bit for bit, or up to rounding: Grappler writes a graph whose
        shapes are known otherwise than one where they are not.

        Raises:
            ModelError: a model fails, or computes something else each time.
        """
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
        """Compare each output row by row at another size.

        Raises:
            ModelError: a model fails, or computes something else each time.
        """
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
        for name, given in self.samples.items():
            arrays[name] = given
            if name in self.batched:
                arrays[name] = np.take(given, np.arange(size) % len(given), 0)
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
                f"can be proved: {error.message}; pass samples={{input: rows}}, or "
                f"{SKIP}"
            ) from error

    def _new(self, inputs: Arrays, size: int) -> Arrays:
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
