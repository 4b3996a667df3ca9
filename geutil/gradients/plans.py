"""Budgets, and the plans that meet them: saved, and used for the same step later."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from geutil.errors import ArgumentTypeError, PlanError
from geutil.gradients.barriers import HOST
from geutil.gradients.segments import scheduled_recomputation
from geutil.gradients.step import (
    PlainStep,
    Recomputation,
    name_of_copy,
    name_of_sent,
    tensors_of,
)
from geutil.graph import runtime, walks
from geutil.graph.types import Operation
from geutil.memory.timeline import drawn_axes
from geutil.sizes import byte_count, size_text

# The version of the format of saved plans; older ones are refused.
_FORMAT = 4
_SENT = -1
"""Where an order has the op that sends a result away, in the place of its turn."""
_PLAIN_ATTRIBUTES = frozenset(("b", "f", "i", "s", "shape", "type"))
_OTHER_GRAPH = (
    "the plan was made for another step: {difference}; call geutil.gradients.plan "
    "again, with the same xs and the batch size that is meant"
)


@dataclass(frozen=True)
class Budget:
    """The limit of a step's peak memory, or of its extra time.

    Attributes:
        limit: bytes; a text such as "1.5GB", "800 MiB" or "50%"; or a fraction of the
            peak of plain gradients, above 0 and up to 1. The planner minimizes the
            extra time within this limit.
        seed: the seed of the planner's random numbers.
        measured: whether to time each kind of op on this machine (some seconds);
            otherwise times are estimated from shapes.
        offload: whether results may also wait in the memory of another device, where
            that takes less time than recomputing them. Ops are then timed, and
            transfers are counted as if no op ran meanwhile, so they may take less. The
            peak is that of the step's own device.
        bandwidth: transfer rate in bytes per second, each way; None measures it.
        offload_device: that device.
        extra_time: instead of a limit, the time of ops that run again, as a fraction of
            the time of the step with plain gradients, or as a text such as "20%". The
            planner minimizes the peak within this time. One more forward pass is about
            0.3.

    Raises:
        ArgumentTypeError: the limit is none of these, the bandwidth or the extra time
            is not positive, or not exactly one of limit and extra time is given.

    Example:
        >>> Budget("1.5GB").bytes(10**10), Budget(0.5).bytes(400), Budget(64).bytes(1)
        (1500000000, 200, 64)
        >>> print(Budget(extra_time=0.2))
        least peak in 20 % more time
    """

    limit: int | float | str | None = None
    seed: int = 0
    measured: bool = False
    offload: bool = False
    bandwidth: float | None = None
    offload_device: str = HOST
    extra_time: float | str | None = None

    def __post_init__(self) -> None:
        """Refuse values that are no budget."""
        if (self.limit is None) == (self.extra_time is None):
            raise ArgumentTypeError(
                "a budget has either a limit, such as '1.5GB' or '50%', or extra_time, "
                "such as 0.2"
            )
        if self.bandwidth is not None and not 0 < self.bandwidth < math.inf:
            raise ArgumentTypeError(
                "bandwidth is a positive number of bytes in a second, got "
                f"{self.bandwidth!r}"
            )
        if self.extra_time is not None:
            if self.extra_share is None:
                raise ArgumentTypeError(
                    "extra_time is a positive number, a part of the time of the step, "
                    f"or a text such as '20%', got {self.extra_time!r}"
                )
        elif self._share is None and byte_count(self.limit) is None:
            raise ArgumentTypeError(
                "a budget is a number of bytes, a text such as '1.5GB' or '50%', or a "
                f"part of plain gradients' peak up to 1.0, got {self.limit!r}"
            )

    def __str__(self) -> str:
        if self.extra_share is not None:
            return f"least peak in {100 * self.extra_share:g} % more time"
        if self._share is not None:
            return f"budget of {100 * self._share:g} % of plain gradients"
        return f"budget of {size_text(self.bytes(0))}"

    def bytes(self, plain_peak: int) -> int:
        """Return the budget in bytes; for one of time, the peak of plain gradients.

        Args:
            plain_peak: the peak of plain gradients.
        """
        if self.extra_time is not None:
            return plain_peak
        if self._share is not None:
            return int(self._share * plain_peak)
        return byte_count(self.limit) or 0

    @property
    def extra_share(self) -> float | None:
        """The extra time as a fraction of the step's time; None if there is a limit."""
        share = _share_of(self.extra_time)
        return share if share is not None and 0 < share < math.inf else None

    @property
    def _share(self) -> float | None:
        """The part of plain gradients, if the limit is one."""
        is_share = isinstance(self.limit, float | str)
        share = _share_of(self.limit) if is_share else None
        return share if share is not None and 0 < share <= 1 else None


def _share_of(value: object) -> float | None:
    """Return a number, or a text in percent, as a share; None for anything else."""
    if isinstance(value, str):
        number, percent, rest = value.partition("%")
        try:
            return float(number) / 100 if percent and not rest.strip() else None
        except ValueError:
            return None
    # True is an int by isinstance, and no share.
    if isinstance(value, float | int) and not isinstance(value, bool):
        return float(value)
    return None


@dataclass(frozen=True)
class Plan:
    """A reusable plan of a step: the ops that run again, and when.

    Ops are numbered in an order that depends on the graph alone, so that a plan also
    fits the same step traced again, or in another process.

    Attributes:
        budget: the limit of the peak, in bytes.
        peak: the predicted peak, in bytes, without updates.
        plain_peak: the same with plain gradients.
        extra_time: the time of ops that run again, as a fraction of the time of the
            step with plain gradients: an estimate from op costs.
        bound: a lower bound of the extra time of the planner's schedules within the
            budget; 0 if unknown, as for steps with very many ops.
        types: the types of the ops that run again, each with its number of runs, the
            most frequent first.
        bursts: the groups of ops that run again together, as op numbers.
        stages: for each backward op after a burst, the number of the last such burst.
        order: the ops in the order of execution, each with the number of its earlier
            runs, or -1 for sending its result away; empty if only the graph orders
            them.
        away: the ops whose results wait on another device instead of running again.
        offload_device: that device.
        encoded: the encoded tensors, as numbers among those that can be encoded.
        loops: for each loop, the values that its backward pass recomputes: none (0),
            those without a product or convolution (1), or all that can be (2).
        ops: the number of ops of the step.
        fingerprint: a digest of the step's graph; "" in a plan for any batch size,
            which fits every step with as many ops.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import Plan, gradients, plan
        >>> graph = tf.Graph()
        >>> with graph.as_default():
        ...     x = y = tf.ones([1000])
        ...     for _ in range(30):
        ...         y = tf.tanh(y)
        ...     found = plan(y, x, "50%")
        ...     slopes = gradients(y, x, checkpoints=found)
        >>> found.peak <= found.plain_peak / 2, len(slopes)
        (True, 1)
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Plan.load(found.save(f"{folder}/plan.json")) == found
        True
    """

    budget: int
    peak: int
    plain_peak: int
    extra_time: float
    bound: float
    types: tuple[tuple[str, int], ...]
    bursts: tuple[tuple[int, ...], ...]
    stages: tuple[tuple[int, int], ...]
    order: tuple[tuple[int, int], ...]
    ops: int
    fingerprint: str
    away: tuple[int, ...] = ()
    offload_device: str = ""
    encoded: tuple[int, ...] = ()
    loops: tuple[int, ...] = ()

    def __str__(self) -> str:
        away = frozenset(self.away)
        count = sum(n not in away for burst in self.bursts for n in burst)
        sent = f"; {len(away)} results sent to {self.offload_device}" if away else ""
        loops = f"; loops that compute again: {self.looping}" if self.looping else ""
        return (
            f"plan for {size_text(self.budget)}: {size_text(self.peak)}, plain "
            f"{size_text(self.plain_peak)}; {count} runs of ops again{loops}{sent}, "
            f"about {self.extra_time:.1%} more time{at_least(self.bound)}"
        )

    @property
    def looping(self) -> int:
        """The number of loops that recompute values."""
        return sum(map(bool, self.loops))

    def fits(self, step: PlainStep) -> bool:
        """Return whether the plan was made for this step.

        Cost: linear in the ops of the step and their edges.
        """
        ops = canonical_ops(step)
        return len(ops) == self.ops and self.fingerprint in ("", fingerprint(step, ops))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan to a JSON file, and return its path."""
        document = {"format": _FORMAT, **asdict(self)}
        text = json.dumps(document, separators=(",", ":"))
        Path(path).write_text(f"{text}\n", encoding="utf-8")
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Return the plan that `save` wrote.

        Raises:
            PlanError: the file holds no plan, or one of another format.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            if document.pop("format") != _FORMAT:
                raise ValueError("another format")
            for name in ("bursts", "stages", "order"):
                document[name] = tuple(tuple(map(int, v)) for v in document[name])
            document["types"] = tuple((str(t), int(n)) for t, n in document["types"])
            for name in ("away", "encoded", "loops"):
                document[name] = tuple(map(int, document[name]))
            plan = cls(**document)
            _check(plan)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"{os.fspath(path)} holds no plan: {error}") from error
        return plan


def at_least(bound: float) -> str:
    """Return a bound of extra time in words; nothing if there is none."""
    return f", and no schedule takes less than {bound:.1%}" if bound > 0 else ""


def _check(plan: Plan) -> None:
    """Raise `ValueError` unless every number of a plan names an op or a burst."""
    numbers = [*plan.away, *(n for burst in plan.bursts for n in burst)]
    numbers += [n for n, _ in (*plan.stages, *plan.order)]
    stages = [stage for _, stage in plan.stages]
    if not all(0 <= n < plan.ops for n in numbers):
        raise ValueError("it names ops that there are not")
    if not all(0 <= stage < len(plan.bursts) for stage in stages):
        raise ValueError("it names bursts that there are not")


@dataclass(frozen=True)
class PlanCurve:
    """The trade-off of memory and time: plans of one step for several budgets.

    Attributes:
        plain_peak: the peak of plain gradients, in bytes.
        ordered_peak: the same in a planned order, which costs no time.
        plans: the plans, from the largest budget to the smallest that could be met.
        unmet: the budgets, in bytes, for which no plan was found.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import plan_curve
        >>> with tf.Graph().as_default():
        ...     x = y = tf.ones([1000])
        ...     for _ in range(30):
        ...         y = tf.tanh(y)
        ...     curve = plan_curve(y, x, ["60%", "30%", "1%"])
        >>> [plan.budget for plan in curve.plans], curve.unmet
        ([72000, 36000], (1200,))
        >>> curve.plans[0].extra_time < curve.plans[1].extra_time
        True
    """

    plain_peak: int
    ordered_peak: int
    plans: tuple[Plan, ...]
    unmet: tuple[int, ...] = ()

    def __str__(self) -> str:
        plain, ordered = size_text(self.plain_peak), size_text(self.ordered_peak)
        lines = [
            f"plain {plain}; in order {ordered}",
            *map(str, self.plans),
            *(f"no plan for {size_text(budget)} was found" for budget in self.unmet),
        ]
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Plot extra time against peaks, with the lower bound of the time.

        Args:
            path: a file, with suffix .png, .svg or .pdf.

        Raises:
            MissingExtraError: matplotlib is not installed.
            PlotError: the suffix names no format.
        """
        with drawn_axes(path, "peak, MB", "extra time, %") as axes:
            peaks = [p.peak / 1e6 for p in self.plans]
            axes.plot(peaks, [100 * p.extra_time for p in self.plans], "o-")
            budgets = [p.budget / 1e6 for p in self.plans]
            bounds = [100 * p.bound for p in self.plans]
            axes.plot(budgets, bounds, "--", label="no schedule is below")
            axes.axvline(self.plain_peak / 1e6, linestyle=":", label="plain")
            axes.legend(frameon=False)
        return Path(path)


def make_plan(
    recomputation: Recomputation,
    budget: int,
    peaks: tuple[int, int],
    times: tuple[float, float],
    offload_device: str = "",
) -> Plan:
    """Return a recomputation as a plan; plain peak and bound of time come last."""
    step = recomputation.step
    ops = canonical_ops(step)
    number = {op: n for n, op in enumerate(ops)}
    segments = recomputation.segments
    bursts = [[number[op] for op in s.ops] for s in segments]
    # Fetched ops come back from another device and do not run again.
    types = (op.type for s in segments for op in s.ops if op not in s.fetched)
    stages = [
        (number[op], stage) for op, stage in recomputation.stages.items() if stage >= 0
    ]
    return Plan(
        budget,
        *peaks,
        *times,
        tuple(Counter(types).most_common()),
        tuple(map(tuple, bursts)),
        tuple(sorted(stages)),
        tuple(_order(recomputation, number)),
        len(ops),
        fingerprint(step, ops),
        tuple(sorted(number[op] for op in recomputation.fetched)),
        offload_device if recomputation.fetched else "",
    )


def _order(
    recomputation: Recomputation, number: Mapping[Operation, int]
) -> Iterable[tuple[int, int]]:
    """Return the ops and copies that have a place in the order, by number and turn."""
    named = {op.name: (n, 0) for op, n in number.items()}
    named |= {name_of_sent(op): (number[op], _SENT) for op in recomputation.fetched}
    turns: Counter[Operation] = Counter()
    for segment in recomputation.segments:
        for op in segment.ops:
            named[name_of_copy(op, turns[op])] = (number[op], turns[op] + 1)
            turns[op] += 1
    places = recomputation.places
    return [named[name] for name in sorted(places, key=places.__getitem__)]


def planned_recomputation(step: PlainStep, plan: Plan) -> Recomputation:
    """Return the recomputation of a plan; raise PlanError if it is for another step."""
    ops = canonical_ops(step)
    difference = ""
    if len(ops) != plan.ops:
        difference = f"that one had {plan.ops} ops, this one has {len(ops)}"
    elif plan.fingerprint not in ("", fingerprint(step, ops)):
        difference = "types, shapes or edges of ops differ"
    if difference:
        raise PlanError(_OTHER_GRAPH.format(difference=difference))
    if plan.away and runtime.is_compiled_by_xla(step.graph):
        raise PlanError(
            f"the plan sends {len(plan.away)} results to {plan.offload_device}, but "
            "XLA compiles this step for one device; plan without offload=True"
        )
    bursts = [[ops[n] for n in burst] for burst in plan.bursts]
    before = {ops[n]: stage + 1 for n, stage in plan.stages}
    # The time of loops is part of the plan's.
    away = {ops[n]: 0.0 for n in plan.away}
    recomputation = scheduled_recomputation(step, bursts, before, away)
    places = {}
    for place, (n, turn) in enumerate(plan.order):
        name = name_of_copy(ops[n], turn - 1) if turn else ops[n].name
        places[name_of_sent(ops[n]) if turn == _SENT else name] = place
    return replace(recomputation, places=places)


def canonical_ops(step: PlainStep) -> list[Operation]:
    """Return the ops of a step in an order that its structure alone decides."""
    # Each comes after its inputs, back edges of loops apart: in depth first order from
    # the ys and the gradients on, input by input.
    ends = (t.op for t in (*step.ys, *tensors_of(step.gradients)))
    return walks.topological_order(
        filter(step.covers, ends), lambda op: filter(step.covers, step.producers(op))
    )


def fingerprint(step: PlainStep, ops: Sequence[Operation]) -> str:
    """Return a digest of the structure of a step, by its canonical `ops`."""
    number = {op: n for n, op in enumerate(ops)}
    digest = hashlib.sha256()
    for op in ops:
        read = [(number.get(t.op, -1), t.value_index) for t in step.inputs(op)]
        awaited = sorted(number.get(p, -1) for p in step.control_inputs(op))
        made = [(t.dtype.name, str(t.shape)) for t in op.outputs]
        told = (op.type, read, awaited, made, _attributes(op))
        digest.update(repr(told).encode())
    return digest.hexdigest()


def _attributes(op: Operation) -> list[tuple[str, Any]]:
    """Return the attributes of an op that decide its result, no names among them."""
    attributes = []
    for name, value in sorted(op.node_def.attr.items()):
        kind = value.WhichOneof("value")
        if kind == "tensor":
            elements = op.outputs[0].shape.num_elements()
            # Larger constants are told apart by their shapes only.
            if elements is not None and elements <= 64:
                attributes.append((name, value.tensor.SerializeToString()))
        elif name.startswith("_") or name in _NAMES:
            continue
        elif kind in _PLAIN_ATTRIBUTES or kind == "list":
            attributes.append((name, _plain(value)))
    return attributes


_NAMES = frozenset(("container", "shared_name", "debug_name", "stack_name"))


def _plain(value: Any) -> bytes:
    """Return an attribute as bytes; of functions in a list only how many there are."""
    if value.HasField("list") and value.list.func:
        return bytes(len(value.list.func))
    written: bytes = value.SerializeToString(deterministic=True)
    return written
