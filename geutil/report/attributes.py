"""Attributes of ops as words."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph.kinds import Operation

_ELEMENTS = 16
"""Constants with more elements are described by dtype and shape alone."""
_LETTERS = 200
_ITEMS = 12
_GIVEN_ANEW = {"container", "debug_name", "shared_name"}
_HIDDEN = {"_class", "_output_shapes", "_gradient_op_type"}
"""What says nothing to a reader that is not shown elsewhere."""


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
    difference, nor is what begins with an underscore.

    Cost: linear in the bytes of the attributes, constants among them.
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


def shortened(text: str) -> str:
    """Return a text, or its beginning if it is long.

    Example:
        >>> shortened("abc")
        'abc'
    """
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"


def _text(value: Any) -> str:
    kind = value.WhichOneof("value")
    if kind == "list":
        return _list_text(value.list)
    return "" if kind is None else _single(kind, getattr(value, kind))


def _list_text(values: Any) -> str:
    for field, items in values.ListFields():
        texts = [_single(field.name, item) for item in items[:_ITEMS]]
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
