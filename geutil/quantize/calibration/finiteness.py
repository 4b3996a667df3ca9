"""Where infinite values and NaN come from.

A mask puts infinities there on purpose: `tf.where(mask, logits, -inf)`. They lie
outside of any range, and are rounded to its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import tensorflow as tf

from geutil.graph.kinds import Operation, Tensor
from geutil.graph.order import topological_sort
from geutil.quantize.calibration.probing import Probe, unquantized
from geutil.quantize.finding.network import Network


class Finiteness:
    """Finds the op that first makes values which are not finite.

    Args:
        model: a quantized model.

    Cost: one copy of the graph, when it is first asked.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @cached_property
    def _network(self) -> Network:
        return Network(self._model.graph, self._model.outputs.values())

    @cached_property
    def _looked_at(self) -> dict[Operation, list[Tensor]]:
        """The floats that each op makes, in topological order."""
        read = {t.op for op in self._network.ops for t in op.inputs}
        ops = topological_sort({*self._network.ops, *read})
        floats = {op: _floats(op) for op in ops if unquantized(op) is None}
        return {op: made for op, made in floats.items() if made}

    @cached_property
    def _probe(self) -> Probe:
        groups = {op.name: made for op, made in self._looked_at.items()}
        return Probe(self._model.graph, self._model.inputs, groups, _look)

    def culprit(self, sample: Mapping[str, Any]) -> Operation | None:
        """Return the first op that makes infinities or NaN, other than by a mask.

        Args:
            sample: the inputs by name.

        Cost: one run that looks at every tensor.
        """
        seen = self._probe.run(sample)
        masking: set[Operation] = set()
        for op in self._looked_at:
            found = seen.get(op.name)
            if found is None or found["finite"] or op not in self._network.place:
                continue
            if found["nan"] or not self._is_masked(op, seen, masking):
                return op
            masking.add(op)
        return None

    def _is_masked(
        self, op: Operation, seen: Mapping[str, Any], masking: set[Operation]
    ) -> bool:
        """Tell whether infinities come from a parameter, or were there before."""
        infinite = [t.op for t in op.inputs if not self._finite(t, seen)]
        data = [o for o in infinite if not self._network.is_parameter(o.outputs[0])]
        return bool(infinite) and all(o in masking for o in data)

    def _finite(self, tensor: Tensor, seen: Mapping[str, Any]) -> bool:
        found = seen.get(tensor.op.name)
        return found is None or bool(found["finite"])


def _floats(op: Operation) -> list[Tensor]:
    return [t for t in op.outputs if t.dtype.is_floating]


def _look(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    del name
    finite = [tf.reduce_all(tf.math.is_finite(t)) for t in tensors]
    nan = [tf.reduce_any(tf.math.is_nan(t)) for t in tensors]
    return {"finite": tf.reduce_all(finite), "nan": tf.reduce_any(nan)}
