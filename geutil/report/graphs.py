"""Graphs as the viewer reads them, and the subjects that can be drawn.

A graph is columns, one entry an op, attributes as words. A subject is a model, a graph,
a function or a part of a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.graph.types import Graph, Operation, Tensor, type_name
from geutil.graph.walks import closure
from geutil.model.model import Model
from geutil.quantize import Int8Comparison
from geutil.report.rows import NOISE_BANDS, noise_band
from geutil.report.tflite_nodes import (
    FileSubject,
    file_subject,
    is_file,
    numbered,
    shortened,
)
from geutil.select.subgraph import SubGraphView

_ELEMENTS = 16
"""Constants with more elements are described by dtype and shape alone."""
# Elements of an attribute that a page prints.
_ITEMS = 12
_GIVEN_ANEW = {"container", "debug_name", "shared_name"}
_HIDDEN = {"_class", "_output_shapes", "_gradient_op_type"}
"""Attributes that say nothing to a reader that is not shown elsewhere."""


def attributes_of(op: Operation) -> dict[str, str]:
    """Return the attributes of an op by name, each as a short text.

    The values of large constants are left out: they may be as large as the model.
    """
    if op.type == "Const" and (op.outputs[0].shape.num_elements() or 0) > _ELEMENTS:
        return {"value": f"{op.outputs[0].dtype.name} {op.outputs[0].shape}"}
    attributes = op.node_def.attr
    return {
        name: shortened(_text(attributes[name]))
        for name in sorted(attributes)
        if name not in _HIDDEN
    }


def altered_attributes(op: Operation, other: Operation) -> tuple[str, ...]:
    """Return the names of the attributes in which two ops of one type differ.

    Names that TensorFlow gives anew each time (of variables, of functions) are no
    difference, nor is a name that begins with an underscore.
    """
    ours, theirs = op.node_def.attr, other.node_def.attr
    return tuple(
        name
        for name in sorted({*ours, *theirs})
        if not name.startswith("_")
        and name not in _GIVEN_ANEW
        and not _names_functions(ours[name])
        and ours[name] != theirs[name]
    )


def _names_functions(value: Any) -> bool:
    return value.HasField("func") or bool(value.list.func)


def called_functions(op: Operation) -> list[str]:
    """Return the names of the functions among an op's attributes, in order."""
    if not any(a.type in ("func", "list(func)") for a in op.op_def.attr):
        return []
    names: list[str] = []
    for attribute in op.op_def.attr:
        value = op.node_def.attr[attribute.name]
        if attribute.type == "func":
            names.append(value.func.name)
        elif attribute.type == "list(func)":
            names += [function.name for function in value.list.func]
    return names


def _text(value: Any) -> str:
    kind = value.WhichOneof("value")
    if kind == "list":
        return _list_text(value.list)
    return "" if kind is None else _single(kind, getattr(value, kind))


def _list_text(values: Any) -> str:
    for kind, items in values.ListFields():
        texts = [_single(kind.name, item) for item in items[:_ITEMS]]
        more = ", …" if len(items) > _ITEMS else ""
        return f"[{', '.join(texts)}{more}]"
    return "[]"


def _single(kind: str, value: Any) -> str:
    if kind == "type":
        return tf.as_dtype(value).name
    if kind == "shape":
        return str(tf.TensorShape(value))
    if kind == "s":
        return str(value.decode("utf-8", "replace"))
    if kind == "func":
        return str(value.name)
    if kind == "tensor":
        array = tf.make_ndarray(value)
        text = np.array2string(array, separator=", ", threshold=_ELEMENTS)
        return " ".join(text.split())
    return str(value)


_HOLDERS = {"VarHandleOp", "VariableV2", "ReadVariableOp"}
_HANDERS = {"Identity", "Cast"}
"""Ops that are drawn with the parameters that they read."""


def _graph_data(
    label: str,
    graph: Graph,
    ends: Mapping[str, str],
    pages: Mapping[str, str],
    ops: Iterable[Operation] | None = None,
    left_out: int = 0,
) -> dict[str, Any]:
    """Return a graph, or some ops of it, as the viewer takes it."""
    listed = graph.get_operations() if ops is None else list(ops)
    places = {op.name: place for place, op in enumerate(listed)}
    types = numbered(op.type for op in listed)
    devices = numbered(op.device for op in listed)
    parameters = _parameters(listed)
    return {
        "label": label,
        "names": [op.name for op in listed],
        "types": [types[op.type] for op in listed],
        "typeNames": list(types),
        "inputs": [_inputs(op, places) for op in listed],
        "controls": [
            sorted(places[c.name] for c in op.control_inputs if c.name in places)
            for op in listed
        ],
        "outputs": [[_holds(t) for t in op.outputs] for op in listed],
        "devices": [devices[op.device] for op in listed],
        "deviceNames": list(devices),
        "attributes": [attributes_of(op) for op in listed],
        "parameters": [places[name] for name in parameters],
        "ends": {places[n]: text for n, text in ends.items() if n in places},
        "calls": _calls(listed, pages),
        "leftOut": left_out,
    }


def add_noise(graph: dict[str, Any], comparison: Int8Comparison) -> None:
    """Add to a graph as the viewer takes it how much noise each op adds by itself.

    Ops of a TFLite file are told by the tensors that they make.
    """
    names = {name: place for place, name in enumerate(graph["names"])}
    if "precisions" in graph:
        constants = {*graph["parameters"]}
        names = {
            attributes["tensor"]: place
            for place, attributes in enumerate(graph["attributes"])
            if "tensor" in attributes and place not in constants
        }
    bands = [-1] * len(graph["names"])
    for layer in comparison.layers:
        ends = (layer.op, layer.tensor.rpartition(":")[0])
        if "precisions" in graph:
            ends = (shortened(layer.file_tensor),) * 2
        for place in {names[name] for name in ends if name in names}:
            bands[place] = noise_band(layer)
    graph |= {"noises": bands, "noiseNames": NOISE_BANDS}


def _inputs(op: Operation, places: Mapping[str, int]) -> list[int]:
    """Return the op and the output of each input, one after the other."""
    flat: list[int] = []
    for t in op.inputs:
        place = places.get(t.op.name)
        if place is not None:
            flat += (place, t.value_index)
    return flat


def _holds(tensor: Tensor) -> str:
    """Return dtype and shape of a tensor, such as "float32 [?, 8]"."""
    shape = tensor.shape
    if shape.rank is None:
        return f"{tensor.dtype.name} [...]"
    sizes = ", ".join("?" if size is None else str(size) for size in shape.as_list())
    return f"{tensor.dtype.name} [{sizes}]"


def _parameters(ops: Sequence[Operation]) -> list[str]:
    """Return the names of ops that hold or read weights and constants."""
    # A constant that waits, as in the loops of version 1, is one all the same.
    free = [op for op in ops if op.type == "Const" or not op.control_inputs]
    handers = {op for op in free if op.type in _HANDERS}

    def reading(op: Operation) -> list[Operation]:
        return [o for t in op.outputs for o in t.consumers() if o in handers]

    parameter_ops = closure(filter(_is_parameter, free), reading)
    return [op.name for op in ops if op in parameter_ops]


def _is_parameter(op: Operation) -> bool:
    return (
        op.type in _HOLDERS
        or op.type in ("Const", "NoOp")
        or (op.type == "Placeholder" and op.outputs[0].dtype.name == "resource")
    )


def _calls(ops: Sequence[Operation], pages: Mapping[str, str]) -> dict[int, list[str]]:
    calls = {}
    for place, op in enumerate(ops):
        shown = [pages[name] for name in called_functions(op) if name in pages]
        if shown:
            calls[place] = shown
    return calls


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
            _graph_data(one.label, one.graph, one.ends, pages, one.ops, one.left_out)
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
