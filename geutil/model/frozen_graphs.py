"""Models as files with one frozen graph: `.pb` and `.pbtxt`.

The nodes themselves tell the inputs and outputs: input `x` is the placeholder `x`, and
output `y` is the tensor `y:0`, which no node reads.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError
from geutil.graph.walks import node_name, short_name, tensor_name
from geutil.model import freezing, programs
from geutil.model.core import EditableModel
from geutil.model.programs import ModelProgram
from geutil.model.sources.graph_defs import named_ends

_logger = logging.getLogger("geutil")
_LEGAL = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")


def write_graph_def(model: EditableModel, path: Path) -> None:
    """Write a binary GraphDef; see `Model.save`."""
    _write(model, path, as_text=False)


def write_pbtxt(model: EditableModel, path: Path) -> None:
    """Write a GraphDef as text; see `Model.save`."""
    _write(model, path, as_text=True)


def _write(model: EditableModel, path: Path, *, as_text: bool) -> None:
    check_names(model)
    dtypes = {name: tensor.dtype for name, tensor in model.outputs.items()}
    graph_def = with_named_ends(stateless_program(model), dtypes)
    _tell_what_opening_misses(graph_def, list(model.outputs))
    tf.io.write_graph(graph_def, str(path.parent), path.name, as_text=as_text)


def check_names(model: EditableModel) -> None:
    """Check that the names of inputs and outputs can be names of nodes."""
    for kind, ends in (("input", model.inputs), ("output", model.outputs)):
        for name in ends:
            if not _LEGAL.fullmatch(name):
                raise ModelError(
                    f"{kind} '{name}' cannot be the name of a node, which this format "
                    f"asks for; choose another one with rename({kind}s={{...}})"
                )
    for name, tensor in model.outputs.items():
        if name in model.inputs and tensor is not model.inputs[name]:
            raise ModelError(
                f"'{name}' is an input and also an output, '{tensor.name}', and this "
                "format has one node of each name; choose another name with "
                "rename(outputs={...})"
            )


def _tell_what_opening_misses(graph_def: Any, outputs: list[str]) -> None:
    """Log the ends that opening misses: inputs, and outputs that no input leads to."""
    shown = named_ends(graph_def, None, "the file", "output")
    missed = [name for name in outputs if name not in shown]
    if missed:
        _logger.warning(
            "the file does not show that %s are outputs, as no input leads to them; "
            "geutil.model.open takes their names: outputs=%s",
            missed,
            outputs,
        )


def stateless_program(model: EditableModel) -> ModelProgram:
    """Return the frozen program of a model that captures nothing."""
    program = freezing.frozen_program(model)
    if program.captures:
        readers = {
            node_name(text): f"'{node.name}' ({node.op})"
            for node in reversed(program.graph_def.node)
            for text in node.input
        }
        descriptions = [
            f"'{node_name(t)}', read by {readers[node_name(t)]}"
            for t in program.captures
        ]
        raise ModelError(
            f"{model!r} reads tables or the like, which are no constants and no part "
            f"of this format: {'; '.join(descriptions)}; save it with "
            "format='saved_model', or cut the model off behind them"
        )
    return program


def with_named_ends(program: ModelProgram, dtypes: Mapping[str, tf.DType]) -> Any:
    """Return the graph of a program, its ends called as the program calls them.

    An output stays the node that it is if that has the right name and serves nothing
    else; else it becomes an Identity, which also waits for the side effects. Nodes that
    bear the name of an end for something else are renamed.
    """
    graph_def, inputs = program.graph_def, list(program.inputs)
    in_place = _outputs_in_place(program)
    ends = {node_name(t): name for name, t in program.inputs.items()}
    ends |= {name: name for name in in_place}
    names = _new_names(graph_def, ends, {*inputs, *program.outputs})
    programs.rename_nodes(program, names)
    for name, tensor in program.outputs.items():
        if name not in in_place and name not in inputs:
            source = short_name(tensor_name(tensor))
            waits = [f"^{effect}" for effect in program.side_effects]
            node = graph_def.node.add(name=name, op="Identity", input=[source, *waits])
            node.attr["T"].type = dtypes[name].as_datatype_enum
    # The order of nodes tells the order of inputs and outputs.
    rank = {name: place for place, name in enumerate((*inputs, "", *program.outputs))}
    graph_def.node.sort(key=lambda node: rank.get(node.name, len(inputs)))
    return graph_def


def _outputs_in_place(program: ModelProgram) -> set[str]:
    """Return the outputs that are named nodes already, which nothing else reads."""
    if program.side_effects:
        return set()
    nodes = programs.nodes_by_name(program.graph_def)
    uses = Counter(node_name(t) for n in nodes.values() for t in n.input)
    uses.update(node_name(t) for t in program.outputs.values())
    return {
        name
        for name, tensor in program.outputs.items()
        if tensor_name(tensor) == f"{name}:0"
        and uses[name] == 1
        and nodes[name].op not in _NO_ENDS
    }


_NO_ENDS = ("Const", "Placeholder")
"""Ops that are not taken for outputs when nothing reads them."""


def _new_names(
    graph_def: Any, ends: Mapping[str, str], reserved: set[str]
) -> dict[str, str]:
    """Return the new names of nodes: ends get theirs, others leave these to them."""
    used_names = {node.name for node in graph_def.node} | reserved
    names = dict(ends)
    for node in graph_def.node:
        if node.name in reserved and node.name not in ends:
            names[node.name] = programs.fresh_name(used_names, node.name)
            used_names.add(names[node.name])
    return names
