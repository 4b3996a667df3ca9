"""Inputs that switch between training and inference, turned into constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.model.errors import ModelError
from geutil.model.programs.program import Program, canonical, node_of, nodes_by_name
from geutil.model.training.options import Options
from geutil.model.training.report import Stripped

KNOWN = frozenset(
    (
        "is_train",
        "is_training",
        "istraining",
        "keras_learning_phase",
        "learning_phase",
        "phase_train",
        "train_mode",
        "train_phase",
        "training",
        "training_mode",
    )
)
"""What switches are called that are found without being named."""
_PLACEHOLDERS = frozenset(("Placeholder", "PlaceholderV2", "PlaceholderWithDefault"))


@dataclass(frozen=True)
class Switches:
    """The switches of a program.

    Attributes:
        nodes: the names of the nodes that are constants now.
        entries: for the report.
    """

    nodes: list[str]
    entries: list[Stripped]


def set_switches(program: Program, options: Options) -> Switches:
    """Make the switches of a program constants, in place.

    Args:
        program: the program; it loses the inputs that are switches.
        options: names further switches, with their values.

    Returns:
        The switches, and boolean inputs that may be some but are not known to be.

    Raises:
        ModelError: a switch does not exist, or its value does not fit.

    Cost: linear in the nodes.
    """
    nodes = nodes_by_name(program.graph_def)
    values = _named(program, nodes, options.switches)
    entries = []
    for node in program.graph_def.node:
        if node.op not in _PLACEHOLDERS or canonical(node.name) in program.captures:
            continue
        if not _may_switch(node) or node.name in values:
            continue
        name = _input_of(program, node.name) or node.name
        if not (_is_known(name) or _is_known(node.name)):
            if name in program.inputs:
                reason = f"pass switches={{'{name}': False}} if it selects training"
                entries.append(Stripped("kept", "switch", name, reason))
        elif options.keeps(node.name):
            entries.append(Stripped("kept", "switch", name, "it is in keep"))
        else:
            values[node.name] = (name, False)
    for node_name, (name, value) in values.items():
        node = nodes[node_name]
        _set(node, name, value)
        program.inputs.pop(name, None)
        entries.append(Stripped("removed", "switch", name, f"it is {value} from now"))
    return Switches(list(values), entries)


def _named(
    program: Program, nodes: Mapping[str, Any], switches: Mapping[str, Any]
) -> dict[str, tuple[str, Any]]:
    """Return for the node of each switch that the caller names its name and value."""
    values = {}
    for name, value in switches.items():
        node = node_of(program.inputs.get(name, name))
        if node not in nodes or nodes[node].op not in _PLACEHOLDERS:
            known = [n for n in nodes if nodes[n].op in _PLACEHOLDERS]
            raise ModelError(
                f"there is no input or placeholder '{name}' to switch; there are "
                f"{[*program.inputs, *(n for n in known if n not in program.inputs)]}"
            )
        values[node] = (_input_of(program, node) or name, value)
    return values


def _input_of(program: Program, node: str) -> str | None:
    for name, tensor in program.inputs.items():
        if node_of(tensor) == node:
            return name
    return None


def _is_known(name: str) -> bool:
    return name.rpartition("/")[2].rstrip("_0123456789").lower() in KNOWN


def _may_switch(node: Any) -> bool:
    """Tell whether a placeholder holds one truth value; unknown shapes may be one."""
    shape = node.attr["shape"].shape
    return node.attr["dtype"].type == tf.bool.as_datatype_enum and not shape.dim


def _set(node: Any, name: str, value: Any) -> None:
    dtype = tf.as_dtype(node.attr["dtype"].type)
    shape = tf.TensorShape(node.attr["shape"].shape)
    try:
        array = np.asarray(value, dtype.as_numpy_dtype)
    except (TypeError, ValueError) as error:
        raise ModelError(f"switch '{name}' is {dtype.name}, got {value!r}") from error
    if not shape.is_compatible_with(array.shape):
        if array.ndim or not shape.is_fully_defined():
            raise ModelError(f"switch '{name}' has shape {shape}, got {value!r}")
        array = np.broadcast_to(array, shape.as_list())
    node.op = "Const"
    node.ClearField("attr")
    del node.input[:]
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(array, dtype))
