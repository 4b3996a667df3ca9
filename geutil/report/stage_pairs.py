"""Stages of a pipeline: graphs and files in their order, compared two by two."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geutil.errors import ArgumentTypeError, ReportError
from geutil.graph.types import type_name
from geutil.memory import bytes_of
from geutil.model import Model
from geutil.quantize import Int8Comparison
from geutil.quantize.planning.int8_kernels import FAKE_QUANT
from geutil.report.differences import (
    ADDED,
    ALTERED,
    REMOVED,
    REWIRED,
    graph_and_file,
    pairs_of,
    statuses,
)
from geutil.report.graphs import Subject, add_noise, subjects_of
from geutil.report.tflite_differences import FUSED, links_of, named_after, pairs_of_file
from geutil.report.tflite_nodes import FileSubject, is_file
from geutil.tflite.kinds import is_quantized

if TYPE_CHECKING:
    from geutil.report.differences import Drawn

_COUNTED = {
    "added": ADDED,
    "removed": REMOVED,
    "rewired": REWIRED,
    "altered": ALTERED,
    "fused": FUSED,
}


@dataclass(frozen=True)
class DrawnStage:
    """A graph or file of a pipeline.

    Attributes:
        label: its name on the page.
        subject: its graphs; the ops of a file are named after those of a graph.
        sizes: bytes of "constants" and "variables", or of the "file".
    """

    label: str
    subject: Drawn
    sizes: Mapping[str, int]

    @property
    def is_quantized(self) -> bool:
        """True if it simulates quantization, or computes in integers."""
        if isinstance(self.subject, FileSubject):
            return any(is_quantized(node.precision) for node in self.subject.nodes)
        return any(op.type in FAKE_QUANT for op in self.subject.drawn_ops())

    def data(self) -> dict[str, Any]:
        """Return the data of it that the viewer shows besides its graph."""
        return {
            "label": self.label,
            "ops": _op_count(self.subject),
            "ends": len(self.subject.drawn_ops()) - _op_count(self.subject),
            "inFunctions": sum(map(_op_count, self.subject.bodies)),
            "sizes": dict(self.sizes),
        }


def simulates_quantization(value: object) -> bool:
    """Return whether a value is a model with FakeQuant ops."""
    return isinstance(value, Model) and any(
        op.type in FAKE_QUANT for op in value.reached_ops()
    )


def _op_count(subject: Drawn) -> int:
    if isinstance(subject, FileSubject):
        return sum(node.op is not None for node in subject.nodes)
    return len(subject.drawn_ops())


def stages_of(stages: object) -> list[DrawnStage]:
    """Return the stages of a pipeline."""
    pairs = _pairs(stages)
    labels = [label for label, _ in pairs]
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    if repeated:
        raise ReportError(f"several stages are called '{repeated[0]}'; name them apart")
    if len(pairs) < 2:
        raise ReportError(
            f"a pipeline has at least two stages, not {len(pairs)}; geutil.report.view "
            "draws a single one"
        )
    values = [value for _, value in pairs]
    subjects = _named(subjects_of(values, labels))
    return [
        DrawnStage(label, subject, _sizes(value, subject))
        for (label, value), subject in zip(pairs, subjects, strict=True)
    ]


def _pairs(stages: object) -> list[tuple[str, Any]]:
    """Return stages as pairs of a label and a model, from a mapping or from pairs."""
    entries = stages.items() if isinstance(stages, Mapping) else stages
    if isinstance(entries, Iterable) and not isinstance(entries, str | bytes):
        listed = list(entries)
        if all(
            isinstance(entry, tuple | list)
            and len(entry) == 2
            and isinstance(entry[0], str)
            and entry[0]
            for entry in listed
        ):
            return [(label, value) for label, value in listed]
    raise ArgumentTypeError(
        "expected stages by name, a mapping or pairs of a name and a model, got "
        f"{type_name(stages)}"
    )


def _named(subjects: Sequence[Drawn]) -> list[Drawn]:
    """Return the subjects; each file named after the nearest graph, if there is one."""
    graphs = [at for at, one in enumerate(subjects) if isinstance(one, Subject)]
    named: list[Drawn] = []
    for at, one in enumerate(subjects):
        if isinstance(one, FileSubject) and graphs:
            # Of two that are as near, a file was made of the one before it.
            nearest = subjects[min(graphs, key=lambda g: (abs(g - at), g))]
            named.append(named_after(graph_and_file(nearest, one)[0], one))
        else:
            named.append(one)
    return named


def _sizes(value: Any, subject: Drawn) -> dict[str, int]:
    """Return the bytes of a file; of a graph those of constants and variables."""
    if is_file(value):
        is_path = isinstance(value, str | os.PathLike)
        return {"file": Path(value).stat().st_size if is_path else len(value)}
    constants = [
        bytes_of(op.outputs[0]) or 0
        for one in (subject, *subject.bodies)
        for op in one.drawn_ops()
        if isinstance(one, Subject) and op.type == "Const"
    ]
    sizes = {"constants": sum(constants)}
    if isinstance(value, Model):
        variables = value.variables.values()
        sizes["variables"] = sum(
            v.dtype.size * (v.shape.num_elements() or 0) for v in variables
        )
    return sizes


def pipeline_data(
    stages: Sequence[DrawnStage], noise: Int8Comparison | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the graphs of a pipeline as the viewer takes them, each once."""
    graphs = _Graphs()
    columns = [stage.subject.data() for stage in stages]
    if noise is not None:
        _add_noise(stages, columns, noise)
    mains = [graphs.place(main) for main, *_ in columns]
    bodies = [
        {body["label"]: graphs.place(body) for body in of_stage}
        for _, *of_stage in columns
    ]
    comparisons = []
    for first, second in itertools.combinations(range(len(stages)), 2):
        sheets = _sheets(stages[first].subject, stages[second].subject)
        for at, sheet in enumerate(sheets):
            sheet["graphs"] = [
                bodies[side].get(label, -1) if at else mains[side]
                for side, label in zip((first, second), sheet["labels"], strict=True)
            ]
        comparisons.append(
            {"stages": [first, second], "counts": _counts(sheets), "sheets": sheets}
        )
    told = {"stages": [s.data() for s in stages], "comparisons": comparisons}
    return graphs.columns, told


class _Graphs:
    """Graphs as the viewer takes them, each kept once whatever it is called."""

    def __init__(self) -> None:
        self.columns: list[dict[str, Any]] = []
        self._places: dict[str, int] = {}

    def place(self, graph: dict[str, Any]) -> int:
        unlabelled = {**graph, "label": ""}
        place = self._places.setdefault(json.dumps(unlabelled), len(self.columns))
        if place == len(self.columns):
            self.columns.append(unlabelled)
        return place


def _sheets(before: Drawn, after: Drawn) -> list[dict[str, Any]]:
    """Return the fate of each op of two stages, and of the functions they call."""
    graph, file = graph_and_file(before, after)
    if graph is None or file is None:
        return [
            _sheet((a.label, b.label), statuses(a.drawn_ops(), b.drawn_ops()))
            for a, b in pairs_of(before, after)
        ]
    sheets = []
    for pair in pairs_of_file(graph, file):
        both, partners = links_of(pair)
        labels = (pair.graph.label, pair.subject.label)
        if graph is not before:
            labels, both, partners = labels[::-1], both[::-1], partners[::-1]
        sheets.append({**_sheet(labels, both), "partners": list(partners)})
    return sheets


def _sheet(
    labels: tuple[str, str], both: tuple[list[int], list[int]]
) -> dict[str, Any]:
    return {
        "labels": list(labels),
        "status": ["".join(map(str, status)) for status in both],
    }


def _counts(sheets: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many ops changed in which way, as the page lists them."""
    counts = {}
    for word, number in _COUNTED.items():
        sides = (0, 1) if number == REMOVED else (1,)
        counts[word] = sum(
            sheet["status"][side].count(str(number))
            for sheet in sheets
            for side in sides
        )
    return counts


def _add_noise(
    stages: Sequence[DrawnStage], columns: Sequence[list[dict[str, Any]]], noise: object
) -> None:
    """Colour the last quantized graph and the last quantized file by noise."""
    if not isinstance(noise, Int8Comparison):
        raise ArgumentTypeError(
            f"expected an Int8Comparison, got {type_name(noise)}; "
            "geutil.quantize.compare_int8 makes them"
        )
    if not noise.layers:
        raise ReportError(
            "the noise of no layer is known; pass layers=True to compare_int8"
        )
    coloured = False
    for kind in (Subject, FileSubject):
        of_kind = [
            at
            for at, stage in enumerate(stages)
            if isinstance(stage.subject, kind) and stage.is_quantized
        ]
        for at in of_kind[-1:]:
            add_noise(columns[at][0], noise)
            coloured = coloured or any(b >= 0 for b in columns[at][0]["noises"])
    if not coloured:
        raise ReportError(
            "no stage has the layers that the noise is of; pass the quantized model "
            "and the file that compare_int8 was given among the stages"
        )
