"""Naming tensors of a model: by object, by name, or by the name of an end."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from geutil.graph.kinds import Tensor, is_op, is_tensor, type_name
from geutil.model.core import EditableModel
from geutil.model.errors import ModelError

Selection = Mapping[str, Any] | Iterable[Any] | Any


def named_tensors(model: EditableModel, selection: Selection) -> dict[str, Tensor]:
    """Return the selected tensors by public name, in order.

    Args:
        model: the model.
        selection: a tensor, an op with one output, or the name of an input, an output,
            a tensor or an op; or several of them; or a mapping from the name that each
            shall have. Without a mapping, ends keep their names and other tensors are
            called after their ops.

    Raises:
        ModelError: one is no tensor of the model's graph, or two have the same name.
    """
    if isinstance(selection, Mapping):
        if not all(isinstance(name, str) and name for name in selection):
            raise ModelError(f"each end needs a name, got {list(selection)}")
        return {name: tensor_of(model, item) for name, item in selection.items()}
    if isinstance(selection, str) or is_tensor(selection) or is_op(selection):
        selection = [selection]
    named: dict[str, Tensor] = {}
    for item in selection:
        tensor = tensor_of(model, item)
        name = _public_name(model, item, tensor)
        if name in named:
            raise ModelError(
                f"two tensors would be called '{name}': '{named[name].name}' and "
                f"'{tensor.name}'; pass a mapping from names to tensors"
            )
        named[name] = tensor
    return named


def tensor_of(model: EditableModel, item: Any) -> Tensor:
    """Return one selected tensor of a model.

    Raises:
        ModelError: there is no such tensor in the model's graph.
    """
    if isinstance(item, str):
        for ends in (model.outputs, model.inputs):
            if item in ends:
                return ends[item]
        try:
            item = model.graph.as_graph_element(item)
        except (KeyError, ValueError) as error:
            raise ModelError(
                f"{model!r} has no input, output, tensor or op '{item}'; "
                f"{_alike(model, item)}"
            ) from error
    if is_op(item):
        if len(item.outputs) != 1:
            raise ModelError(
                f"op '{item.name}' has {len(item.outputs)} outputs; pass a tensor such "
                f"as '{item.name}:0'"
            )
        item = item.outputs[0]
    if not is_tensor(item):
        raise ModelError(f"expected a tensor, an op or a name, got {type_name(item)}")
    if item.graph is not model.graph:
        raise ModelError(f"'{item.name}' is in another graph than {model!r}")
    return item


def _alike(model: EditableModel, name: str) -> str:
    """Say what names resemble one that does not exist."""
    names = [op.name for op in model.graph.get_operations()]
    alike = [n for n in names if name.lower() in n.lower()][:5]
    alike = alike or difflib.get_close_matches(name, names, 5, 0.5)
    ends = [*model.inputs, *model.outputs]
    return f"similar are {alike}" if alike else f"its ends are {ends}"


def _public_name(model: EditableModel, item: Any, tensor: Tensor) -> str:
    if isinstance(item, str) and (item in model.outputs or item in model.inputs):
        return item
    for ends in (model.inputs, model.outputs):
        for name, t in ends.items():
            if t is tensor:
                return name
    return tensor.op.name if tensor.value_index == 0 else tensor.name.replace(":", "_")
