"""Inputs that an op joins in one range, and how much of that range each takes.

A concat of boxes in pixels and of scores from 0 to 1 has one range, from 0 to 640 say.
In 8 bits its steps are 2.5, and all scores are stored as 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import Words
from geutil.graph.types import Operation, Tensor
from geutil.quantize.calibration.ranges import RangeSite
from geutil.quantize.planning.int8_kernels import FAKE_QUANT, KERNELS, Treatment
from geutil.quantize.spec import Range, levels, step

Array = np.ndarray[Any, Any]

FEWEST = 16
"""An input with fewer steps of the common range has lost four of eight bits."""


@dataclass(frozen=True)
class NarrowInput:
    """An input that gets few steps of the range that it shares with other inputs.

    Attributes:
        op: the op, by name.
        op_type: its type.
        input: the op that computes the input, by name.
        steps: the number of steps that its values span.
        of: the number of steps of the range.
        ops: all ops that join inputs in this range, including `op`.
    """

    op: str
    op_type: str
    input: str
    steps: float
    of: int
    ops: tuple[str, ...]

    def __str__(self) -> str:
        others = " and ".join(f"'{name}'" for name in self.ops if name != self.op)
        too = f", and the same for {others}, which share the range" if others else ""
        skip = Words(f"overrides={{'{self.op}': 'skip'}}", f"'{self.op}'")
        return (
            f"'{self.input}' gets {self.steps:.3g} of {self.of} steps of the range in "
            f"which '{self.op}' ({self.op_type}) joins it; make it an output of its "
            f"own, or quantize with {skip}{too}"
        )


@dataclass(frozen=True, eq=False)
class JoinedPart:
    """An input of a concat or a stack, and where it lies in the result."""

    name: str  # the op that makes it, by name
    axis: int  # the axis along which parts are joined
    start: int
    stop: int

    def of(self, values: Array) -> Array:
        """Return its share of the values of the result."""
        return values[(*(slice(None),) * self.axis, slice(self.start, self.stop))]


def parts_of(tensor: Tensor) -> tuple[JoinedPart, ...]:
    """Return the parts that a tensor is joined of; none if it is no concat or stack."""
    result = _exact(tensor)
    op, rank = result.op, result.shape.rank
    if op.type == "ConcatV2":
        (*inputs, end), sizes = op.inputs, None
        axis = tf.get_static_value(end)
    elif op.type == "Pack":
        inputs, axis = list(op.inputs), op.get_attr("axis")
        sizes = [1] * len(inputs)
    else:
        return ()
    if rank is None or axis is None:
        return ()
    place = int(axis) % rank
    sizes = sizes or [t.shape[place] for t in inputs]
    if len(inputs) < 2 or None in sizes:
        return ()
    ends = np.cumsum([0, *sizes]).tolist()
    return tuple(
        JoinedPart(_exact(t).op.name, place, start, stop)
        for t, start, stop in zip(inputs, ends, ends[1:], strict=False)
    )


def are_uneven(widths: Sequence[float]) -> bool:
    """Tell whether some parts are so narrow that one range stores them badly."""
    return len(widths) > 1 and max(widths) > FEWEST * min(widths)


def same_values(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, and those that it is in steps or as it is, the exact one last."""
    yield tensor
    while tensor.op.type in ("Identity", *FAKE_QUANT):
        tensor = tensor.op.inputs[0]
        yield tensor


def _exact(tensor: Tensor) -> Tensor:
    return [*same_values(tensor)][-1]


class JoinedInputs:
    """The inputs that the ops of a model join, and the values that they have."""

    def __init__(self, ops: Iterable[Operation], sites: Sequence[RangeSite]) -> None:
        site_by_op = {op: site for site in sites for op in site.ops}
        self._joins: list[tuple[Operation, RangeSite, dict[str, Tensor]]] = []
        self._widths: dict[str, tuple[float, float]] = {}
        for op in ops:
            kernel = KERNELS.get(op.type)
            if kernel is None or kernel.treatment is not Treatment.JOINS:
                continue
            readers = op.outputs[0].consumers()
            found = [site_by_op[r] for r in readers if r in site_by_op]
            inputs = {
                f"{op.name}:{slot}": op.inputs[slot]
                for slot in kernel.data_inputs(op)
                if op.inputs[slot].dtype.is_floating
                # A number, such as the one of a maximum, is no values to tell apart.
                and op.inputs[slot].shape.num_elements() != 1
            }
            if found and len(inputs) > 1:
                self._joins.append((op, found[0], inputs))
        # The inputs, each by a name that no range has.
        self.groups = {
            n: [t] for _, _, inputs in self._joins for n, t in inputs.items()
        }

    def add(self, seen: Mapping[str, Mapping[str, Array]]) -> None:
        """Take in the smallest and the largest values of a batch, by group."""
        for name in self.groups:
            if name in seen:
                low, high = self._widths.get(name, (0.0, 0.0))
                values = seen[name]
                self._widths[name] = (
                    min(low, float(values["low"])),
                    max(high, float(values["high"])),
                )

    def narrow(self, ranges: Mapping[str, Range]) -> tuple[NarrowInput, ...]:
        """Return the inputs that get few steps, where another one gets more."""
        found = []
        ops_by_range: dict[str, list[str]] = {}
        for op, site, _ in self._joins:
            ops_by_range.setdefault(site.name, []).append(op.name)
        for op, site, inputs in self._joins:
            bits, narrow = site.form.bits, site.form.narrow_range
            size = float(step(*ranges[site.name], bits, narrow))
            steps = {
                name: (high - low) / size
                for name in inputs
                for low, high in [self._widths.get(name, (0.0, 0.0))]
            }
            # Where all are narrow, none gets more steps than another.
            if max(steps.values()) < FEWEST:
                continue
            found += [
                NarrowInput(
                    op.name,
                    op.type,
                    _exact(inputs[name]).op.name,
                    count,
                    levels(bits, narrow) - 1,
                    tuple(ops_by_range[site.name]),
                )
                for name, count in steps.items()
                # An input that is always 0 needs no steps.
                if 0.0 < count < FEWEST
            ]
        return tuple(found)
