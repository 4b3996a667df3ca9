"""Timelines as the viewer takes them, with the phase of each op."""

from __future__ import annotations

from typing import Any

from geutil.memory import Timeline, phases

PHASES = (*phases.PHASES, "other")


def timeline_data(label: str, timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as the viewer takes it.

    Cost: linear in the ops.
    """
    return {
        "label": label,
        "source": timeline.source,
        "ops": [moment.op for moment in timeline.moments],
        "bytes": [moment.bytes for moment in timeline.moments],
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
