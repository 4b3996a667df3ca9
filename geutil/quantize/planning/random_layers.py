"""Random layers: dropout and noise, and arithmetic on random numbers alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from geutil.graph import op_types
from geutil.graph.types import Operation, Tensor
from geutil.rewrite.matching import match
from geutil.rewrite.rules.dropout import dropout_removal, noise_removal
from geutil.select.networks.provenance import DATA_SLOTS, Origins


@dataclass(frozen=True, eq=False)
class RandomLayer:
    """Dropout, stochastic depth or noise, which at inference forwards its input."""

    end: Operation  # the op that makes the result
    source: Tensor
    ops: tuple[Operation, ...]  # all ops of the layer, the end among them


def find_random_layers(
    ops: Sequence[Operation], noise: set[Operation]
) -> dict[Operation, RandomLayer]:
    """Return the outermost random layers among ops by their ends."""
    if not noise:
        return {}
    layers: dict[Operation, RandomLayer] = {}
    inside: set[Operation] = set()
    rules = (*dropout_removal(), *noise_removal())
    matches = [
        (m, rule) for rule in rules for m in match(ops, rule.pattern, overlaps=True)
    ]
    place = {op: index for index, op in enumerate(ops)}
    for m, rule in sorted(matches, key=lambda found: -place[found[0].root]):
        if m.root in inside or rule.objection(m) is not None:
            continue
        layers[m.root] = RandomLayer(m.root, m["x"], m.ops)
        inside.update(m.ops)
    return layers


def noise_ops(ops: Iterable[Operation], origins: Origins) -> set[Operation]:
    """Return the ops that compute with random numbers, and with no data."""
    # A layer's result on random numbers counts as data: they are the network's input.
    noise: set[Operation] = set()
    for op in ops:
        if op.type in DATA_SLOTS:
            continue
        draws = op_types.is_random(op.type)
        # Integers are seeds, shapes and places, unless integers are made of them.
        counts = not draws and any(t.dtype.is_integer for t in op.outputs)
        sources = [
            t for t in op.inputs if counts or t.dtype.is_floating or t.dtype.is_bool
        ]
        if (draws or any(t.op in noise for t in sources)) and all(
            t.op in noise or origins.is_parameter(t) for t in sources
        ):
            noise.add(op)
    return noise
