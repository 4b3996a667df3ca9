"""Subjects that can be drawn: models, graphs, functions, and parts of graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.graph.types import Graph, Operation, type_name
from geutil.model.model import Model
from geutil.report.graphs import graph_data
from geutil.report.tflite_nodes import FileSubject, file_subject, is_file
from geutil.select.subgraph import SubGraphView


@dataclass(frozen=True)
class Subject:
    """A graph to draw, with its ends as far as they are known.

    Attributes:
        label: its name on the page.
        graph: the graph.
        ops: the ops of it to draw; None for all: those that a model runs.
        ends: labels of ops that are ends of the model, by their names.
        bodies: the functions that its ops call.
        left_out: how many ops of a model are not drawn, since it does not run them.
    """

    label: str
    graph: Graph
    ops: tuple[Operation, ...] | None = None
    ends: Mapping[str, str] = field(default_factory=dict)
    bodies: tuple[Subject, ...] = ()
    left_out: int = 0

    def drawn_ops(self) -> list[Operation]:
        """Return the ops to draw, in order."""
        return list(self.graph.get_operations() if self.ops is None else self.ops)

    def empty(self) -> Subject:
        """Return a subject of its name that has nothing to draw."""
        return Subject(self.label, tf.Graph())

    def data(self) -> list[dict[str, Any]]:
        """Return the graph and its functions as the viewer takes them."""
        pages = {body.label: body.label for body in self.bodies}
        return [
            graph_data(one.label, one.graph, one.ends, pages, one.ops, one.left_out)
            for one in (self, *self.bodies)
        ]


def sides_of(
    before: object, after: object, labels: Sequence[str] = ("", "")
) -> tuple[Subject | FileSubject, Subject | FileSubject]:
    """Return the subjects of two values; see `subjects_of`."""
    first, second = subjects_of((before, after), labels)
    return first, second


def subjects_of(
    values: Sequence[object], labels: Sequence[str]
) -> list[Subject | FileSubject]:
    """Return the subjects of values; of files the subgraph of a model's signature."""
    models = [value for value in values if isinstance(value, Model)]
    signature = models[0].signature if models else None
    return [
        file_subject(value, label, signature)
        if is_file(value)
        else subject_of(value, label)
        for value, label in zip(values, labels, strict=True)
    ]


def subject_of(value: object, label: str = "") -> Subject | FileSubject:
    """Return the subject of a value."""
    if is_file(value):
        return file_subject(value, label)
    if isinstance(value, Model):
        bodies = tuple(
            Subject(name, body.graph, None, _ends(body))
            for name, body in value.functions.items()
        )
        ops = tuple(value.reached_ops())
        return Subject(
            label=label or value.signature,
            graph=value.graph,
            ops=ops,
            ends=_ends(value),
            bodies=bodies,
            left_out=len(value.graph.get_operations()) - len(ops),
        )
    if isinstance(value, SubGraphView):
        return Subject(label or "selection", value.graph, tuple(value.ops))
    if isinstance(value, tf.types.experimental.ConcreteFunction):
        return Subject(label or value.name, value.graph)
    if isinstance(value, tf.Graph):
        return Subject(label or getattr(value, "name", "graph"), value)
    raise ArgumentTypeError(
        "expected a Model, a tf.Graph, a SubGraphView, a ConcreteFunction, or the path "
        f"or bytes of a TFLite file, got {_shown(value)}; geutil.model.open opens "
        "other files, Keras models and functions"
    )


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else type_name(value)


def _ends(model: Model) -> dict[str, str]:
    """Return labels of the placeholders and sinks of a model, by their ops."""
    ends = {t.op.name: f"input {name}" for name, t in model.inputs.items()}
    for name, sink in model.outputs.sinks.items():
        ends[sink.name] = f"output {name}"
    return ends
