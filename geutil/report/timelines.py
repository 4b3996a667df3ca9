"""Timelines as the viewer reads them, and their summaries."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from geutil.errors import ArgumentTypeError, ReportError
from geutil.gradients import PlanCurve
from geutil.gradients import Report as GradientReport
from geutil.graph.types import type_name
from geutil.memory import LiveTensor, Timeline, program

PHASES = (*program.PHASES, "other")


def timeline_data(label: str, timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as the viewer takes it."""
    return {
        "label": label,
        "source": timeline.source,
        "ops": [moment.op for moment in timeline.moments],
        "bytes": [moment.bytes for moment in timeline.moments],
        "times": [moment.time for moment in timeline.moments],
        "phases": [
            PHASES.index(moment.phase or "other") for moment in timeline.moments
        ],
        "held": [
            {"name": t.name, "type": t.op_type, "bytes": t.bytes}
            for t in timeline.at_peak
        ],
        "variables": timeline.variable_bytes,
        "constants": timeline.constant_bytes,
    }


def lifetimes_data(graph: Mapping[str, Any], timeline: Timeline) -> dict[str, Any]:
    """Return when which op's results are held, as the viewer takes it."""
    if not timeline.lifetimes:
        raise ReportError(
            "the timeline does not know when each tensor is held; "
            "geutil.memory.predict makes one that does"
        )
    places = {name: place for place, name in enumerate(graph["names"])}
    makers = [places.get(life.op, -1) for life in timeline.lifetimes]
    if max(makers) < 0:
        raise ReportError(
            "no op whose result is held is in the graph: pass a timeline of this graph"
        )
    lives = timeline.lifetimes
    return {
        "timeline": timeline_data("step", timeline),
        "phaseNames": PHASES,
        "steps": [places.get(moment.op, -1) for moment in timeline.moments],
        "names": [life.tensor.name for life in lives],
        "ops": makers,
        "bytes": [life.tensor.bytes for life in lives],
        "first": [life.first for life in lives],
        "last": [life.last for life in lives],
    }


_TYPES = 4
"""How many types of recomputed ops are named, the most frequent ones."""


def curve_data(curve: object, report: object) -> dict[str, Any]:
    """Return a curve of plans as the viewer takes it."""
    if not isinstance(curve, PlanCurve):
        raise ArgumentTypeError(
            f"expected a PlanCurve, got {type_name(curve)}; "
            "geutil.gradients.plan_curve makes them"
        )
    chosen = getattr(report, "budget", None)
    return {
        "plain": curve.plain_peak,
        "ordered": curve.ordered_peak,
        "plans": [
            {
                "budget": plan.budget,
                "peak": plan.peak,
                "extraTime": plan.extra_time,
                "bound": plan.bound,
                "again": sum(map(len, plan.bursts)),
                "types": plan.types[:_TYPES],
                "loops": plan.looping,
                "chosen": plan.budget == chosen,
            }
            for plan in curve.plans
        ],
        "unmet": list(curve.unmet),
    }


_UNITS = (("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 1))
"""Units, their bytes, and decimals, as `bytesText` in web/src/dom.ts has them."""


def _size(count: int) -> str:
    """Return bytes in words, as the rest of the page shows them."""
    for unit, size, decimals in _UNITS:
        if count >= size:
            return f"{count / size:.{decimals}f} {unit}"
    return f"{count} B"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


Labelled = Sequence[tuple[str, Timeline]]
"""Timelines with their labels."""

_NAMED = 3
"""The layers that are named of each step."""
_MUCH = 0.25
"""A part of the peak that is worth an advice: without it a quarter less is held."""
_GRADIENT = re.compile(r"^.*(?:^|/)(?:recomputed|gradients|gradient_tape)(?:_\d+)?/")
"""The scopes that TensorFlow and geutil put before the name of a forward op."""


def answers_of(timelines: Labelled, report: object, curve: object) -> dict[str, Any]:
    """Return the answers that a memory page gives at first sight, as lines of text."""
    return {
        "Peak": _peak_lines(timelines),
        "Moment": [_moment_line(label, line) for label, line in timelines],
        "Layers": [_layers_line(label, line) for label, line in timelines],
        "Advice": _advice(timelines, report, curve),
    }


def _peak_lines(timelines: Labelled) -> list[str]:
    first, last = timelines[0][1], timelines[-1][1]
    lines = [f"{label}: {_size(t.peak)} ({t.source})" for label, t in timelines]
    if last is not first and first.peak:
        lines.append(f"ratio {last.peak / first.peak:.2f}")
    lines.append(
        f"variables {_size(last.variable_bytes)} and constants "
        f"{_size(last.constant_bytes)} come on top"
    )
    return lines


def _moment_line(label: str, timeline: Timeline) -> str:
    """Say in which phase the peak is, how late, and in which layer."""
    at = timeline.peak_index
    if at is None:
        return f"{label}: no ops"
    moment = timeline.moments[at]
    times = [m.time for m in timeline.moments]
    total = sum(times)
    late = sum(times[:at]) / total if total else at / len(times)
    unit = "time" if total else "ops"
    phase = f"{moment.phase}, " if moment.phase else ""
    passed = f"{_percent(late)} of the {unit}"
    return f"{label}: {phase}after {passed}, in {layer_of(moment.op)}"


def layer_of(op: str) -> str:
    """Return the scope of the forward op that an op is, repeats or differentiates.

    An op in no scope is its own layer.

    Example:
        >>> layer_of("gradients/net/conv_1/Conv2D_grad/Conv2DBackpropInput")
        'net/conv_1'
        >>> layer_of("Tanh_3")
        'Tanh_3'
    """
    parts = _GRADIENT.sub("", op).split("/")
    behind = next((i for i, part in enumerate(parts) if part.endswith("_grad")), None)
    if behind is not None:
        parts = [*parts[:behind], parts[behind].removesuffix("_grad")]
    return "/".join(parts[:-1]) or parts[0]


def _layers_line(label: str, timeline: Timeline) -> str:
    """Name the layers whose tensors are most of the peak, the largest first."""
    held: Counter[str] = Counter()
    for tensor in timeline.at_peak:
        held[layer_of(_maker(tensor))] += tensor.bytes
    held = _below_root(held)
    most = ", ".join(
        f"{layer} {_size(size)} ({_percent(size / timeline.peak)})"
        for layer, size in held.most_common(_NAMED)
        if size
    )
    return f"{label}: {most or 'nothing is held'}"


def _below_root(held: Counter[str]) -> Counter[str]:
    """Return the bytes of layers, by the scopes below the one that holds most."""
    root = ""
    while True:
        inner: Counter[str] = Counter()
        for name, size in held.items():
            if name.startswith(root):
                inner[name[len(root) :].split("/")[0]] += size
        largest, most = max(inner.items(), key=lambda item: item[1], default=("", 0))
        is_scope = any(name.startswith(f"{root}{largest}/") for name in held)
        # Below a scope with less than half, other layers would be hidden.
        if not is_scope or most <= sum(held.values()) / 2:
            break
        root = f"{root}{largest}/"
    short: Counter[str] = Counter()
    for name, size in held.items():
        inside = name.removeprefix(root)
        short[inside.split("/")[0] if name.startswith(root) else name] += size
    return short


def _maker(tensor: LiveTensor) -> str:
    """Return the name of the op that a buffer was made by."""
    return tensor.name.partition(":")[0].partition(" ")[0]


def _advice(timelines: Labelled, report: object, curve: object) -> list[str]:
    """Return advice that follows from the figures, the largest saving first."""
    lines = _saving_lines(timelines, report)
    if isinstance(curve, PlanCurve) and curve.plans:
        least = min(curve.plans, key=lambda plan: plan.peak)
        lines.append(
            f"A budget of {_size(least.budget)} holds {_size(least.peak)} in "
            f"{_percent(least.extra_time)} more time: the least peak of the curve."
        )
    step = timelines[-1][1]
    phases = {moment.op: moment.phase for moment in step.moments}
    made: Counter[str] = Counter()
    for tensor in step.at_peak:
        made[phases.get(_maker(tensor), "")] += tensor.bytes
    parts = {phase: size / step.peak for phase, size in made.items() if step.peak}
    is_trained = "backward" in phases.values()
    if is_trained and len(timelines) == 1 and parts.get("forward", 0) >= _MUCH:
        lines.append(
            f"Checkpoints: {_percent(parts['forward'])} of the peak are results of the "
            "forward pass, which gradients(..., checkpoints='memory') computes again."
        )
    if is_trained and len(timelines) == 1 and parts.get("backward", 0) >= _MUCH:
        lines.append(
            f"Order: {_percent(parts['backward'])} of the peak are gradients; "
            "gradients(..., checkpoints=None) lets each update come as soon as its "
            "gradient is there, and takes no more time."
        )
    largest = max(step.at_peak, key=lambda tensor: tensor.bytes, default=None)
    if largest is not None and largest.bytes >= step.peak / 2:
        lines.append(
            f"One tensor of {layer_of(_maker(largest))} is "
            f"{_percent(largest.bytes / step.peak)} of the peak: only a smaller batch, "
            "or smaller parts of that layer, lower it."
        )
    if step.variable_bytes > step.peak:
        lines.append(
            "Variables hold more than the step: a smaller batch changes little."
        )
    return lines or ["No single cause: a smaller batch lowers all of it."]


def _saving_lines(timelines: Labelled, report: object) -> list[str]:
    """Say how much less the second step holds, and at which price in time."""
    lines = []
    if len(timelines) > 1:
        (_, first), (label, second) = timelines
        times = [sum(m.time for m in line.moments) for line in (first, second)]
        saved = first.peak - second.peak
        text = f"{label}: {_size(abs(saved))} {'less' if saved >= 0 else 'more'}"
        # Times of different origins, such as measured ones, cannot be compared.
        if min(times) > 0 and first.source == second.source:
            longer = times[1] / times[0] - 1
            word = "more" if longer >= 0 else "less"
            text += f", {_percent(abs(longer))} {word} time"
        lines.append(f"{text}.")
    if isinstance(report, GradientReport):
        again = len({op.name for op in report.recomputed})
        lines.append(
            f"{len(report.kept)} tensors are kept, {_size(report.kept_bytes)}; "
            f"{again} ops run again."
        )
    return lines
